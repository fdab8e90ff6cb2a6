//! The processes: of `slipgate attach` two, of `slipgate run` three, and one more with `--metrics`.
pub(crate) mod engine;
mod inherited;
pub(crate) mod metrics;
pub(crate) mod vmm;
