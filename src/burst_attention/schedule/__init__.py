"""The plan as data: what is computed where and when, what travels, and what it costs."""

from burst_attention.schedule.buffers import PlanError
from burst_attention.schedule.build import build_plan
from burst_attention.schedule.bundles import Bundle, Field, Shapes, make_bundle
from burst_attention.schedule.heads import HeadsPlan, build_heads_plan, split_heads
from burst_attention.schedule.memory import growth_by_round, room_at_the_end
from burst_attention.schedule.plan import PhasePlan, Plan, Round, Transfer, Visit
from burst_attention.schedule.simulate import simulate

__all__ = [
    "Bundle",
    "Field",
    "HeadsPlan",
    "PhasePlan",
    "Plan",
    "PlanError",
    "Round",
    "Shapes",
    "Transfer",
    "Visit",
    "build_heads_plan",
    "build_plan",
    "growth_by_round",
    "make_bundle",
    "room_at_the_end",
    "simulate",
    "split_heads",
]
