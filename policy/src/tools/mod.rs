//! Tools for people who write policies: warnings about a file, explanations, the difference between
//! two files over recorded flows, and the least policy that covers them. They read no file
//! themselves.
mod bounds;
pub mod check;
mod compiled;
pub mod diff;
mod explain;
pub mod flow_log;
pub mod learn;

pub use self::{
    compiled::Compiled,
    explain::{explain, host_and_port},
};
