//! The processes: of `slipgate attach` two, of `slipgate run` all three.
pub(crate) mod broker;
pub(crate) mod engine;
mod inherited;
pub(crate) mod vmm;
