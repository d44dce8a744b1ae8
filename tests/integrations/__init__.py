"""Tests of the integrations with other libraries."""
