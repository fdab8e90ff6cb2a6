//! The two processes of `slipgate attach`.
pub(crate) mod broker;
pub(crate) mod engine;
