"""Tests of the ground: no clock, no store, no sleep."""
