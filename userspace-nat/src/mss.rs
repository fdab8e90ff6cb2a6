//! MSS clamping.
