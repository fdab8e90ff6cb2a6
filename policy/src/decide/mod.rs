//! Decisions of a policy about a destination, a name, or a DNS question.
mod by_address;
mod by_name;
pub(crate) mod exfil_budget;
pub(crate) mod host_loopback;
pub(crate) mod inspection;
pub(crate) mod token_bucket;
