//! DNS proxy.
