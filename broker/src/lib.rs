//! The broker: what `slipgate attach` and `slipgate run` do while they run. It has CAP_NET_ADMIN and
//! CAP_BPF and never sees a guest's packet.
//!
//! # Theory of operation
//! 1. Everything in the kernel is made or joined, but no TAP is brought up ([`start`]).
//! 2. The engine is started from this binary, is sent descriptors and how it is to work, drops
//!    what it may, adopts what a predecessor left, and says that it is ready.
//! 3. TAPs are attached to and brought up, and `slipgate: ready` is printed.
//! 4. One loop follows the network, answers the control socket and watches the engine.
//!
//! When the engine ends unasked, or hangs, another one takes its place ([`process`]). One that ends
//! again and again ends the broker, with an error: established flows go on in the kernel, pins stay,
//! and the next start adopts them. When the broker dies the engine sees the end of the channel, and
//! the kernel kills it in any case. SIGTERM and SIGINT end both in order, as `--on-exit` says,
//! whether the broker gets them alone or all processes do; SIGHUP opens the flow log again and puts
//! the policy's files in force as they are now ([`policy_apply`]).
//!
//! With `run` there is a third process, the VMM, which is started before all of this and let go
//! after step 3 ([`vm`], [`run`](mod@run)). The loop watches it too, and its end is the loop's.
//!
//! # Modules
//! [`kernel_state`] is all that the broker has in the kernel. [`policy_apply`] puts another policy in
//! force, [`control_api`] answers clients; both are passed the [`parts`] that they work with.
//! [`serve`] is the loop that drives them all.
pub mod config;
mod control_api;
pub mod host;
mod kernel_errors;
mod kernel_state;
mod output_files;
mod parts;
mod persisted_policy;
mod policy_apply;
pub mod privileges;
mod process;
mod role;
mod run;
mod say;
mod serve;
mod start;
mod vm;

pub use self::{
    run::{run, run_vm},
    say::{counted, say},
    vm::{EXIT_USAGE, exit_status},
};

use std::path::Path;

use slipgate_control::{Paths, paths::netns_inode};

/// The pins and run-time files of this network namespace under `--pin-dir`.
///
/// # Errors
/// It can't be found out which network namespace this is.
pub fn paths(pin_dir: &Path) -> slipgate_control::Result<Paths> {
    Paths::with_pin_dir(pin_dir.join(netns_inode()?.to_string()))
}
