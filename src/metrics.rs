//! Counters and gauges.
