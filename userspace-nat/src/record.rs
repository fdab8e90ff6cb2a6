//! The flow log.
