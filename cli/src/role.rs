//! The processes: of `slipgate attach` two, of `slipgate run` three, one more with `--metrics`, and one for
//! each socket of `slipgate serve`'s API.
pub(crate) mod api;
pub(crate) mod engine;
mod inherited;
pub(crate) mod metrics;
#[cfg(target_arch = "x86_64")]
pub(crate) mod vmm;
