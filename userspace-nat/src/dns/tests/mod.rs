//! Tests of the whole proxy, and what they and the tests of its parts share.
mod by_rules;
pub(in crate::dns) mod hickory;
pub(in crate::dns) mod rig;
