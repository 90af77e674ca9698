"""Findings and traces from the telemetry that saves have stored."""
