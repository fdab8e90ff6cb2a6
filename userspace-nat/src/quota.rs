//! Flow caps and rates.
