//! The table of own live flows.
