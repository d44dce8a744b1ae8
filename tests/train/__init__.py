"""Tests of `burst train`."""
