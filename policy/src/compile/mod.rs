//! Compilation of policies: a decision costs about the same with one rule and with thousands.
pub(crate) mod dns_bypass;
mod guard;
pub(crate) mod identity;
pub(crate) mod policy;
pub(crate) mod protected;
pub(crate) mod set;
mod texts;
