"""What was measured: record schema, journal and queries."""
