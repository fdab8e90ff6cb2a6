//! The broker: the work of `slipgate attach` and `slipgate run` while they run. It has
//! CAP_NET_ADMIN and CAP_BPF and never sees a guest's packet.
//!
//! # Theory of operation
//! 1. All kernel state is created or joined, but no TAP is brought up ([`start`]).
//! 2. The engine is started from this binary, gets descriptors and settings, drops its privileges,
//!    adopts a predecessor's flows, and reports that it is ready.
//! 3. TAPs are attached to and brought up, and `slipgate: ready` is printed.
//! 4. One loop follows the network, answers the control socket and watches the engine.
//!
//! When the engine ends unasked, or hangs, another one takes its place ([`process`]). An engine
//! that ends repeatedly ends the broker, with an error: established flows continue in the kernel,
//! pins stay, and the next start adopts them. When the broker dies the engine sees the end of the
//! channel, and the kernel kills it in any case. SIGTERM and SIGINT end both in order, as
//! `--on-exit` says, whether the broker gets them alone or all processes do; SIGHUP reopens the
//! flow log and puts the present contents of the policy's files in force ([`policy_apply`]).
//!
//! With `run` there is a third process, the VMM, which is started before all of this and runs the
//! guest after step 3 ([`vm`], [`run`](mod@run)). The loop watches it too, and ends when the VMM
//! does.
//!
//! # Modules
//! [`kernel_state`] is everything that the broker has in the kernel. [`policy_apply`] puts another
//! policy in force, [`control_api`] answers clients; both work on the [`parts`]. [`serve`] is the
//! loop that drives them.
mod asking;
pub mod config;
mod control_api;
mod handover;
pub mod host;
mod joined;
mod kernel_errors;
mod kernel_state;
mod machine_orders;
mod output_files;
mod parts;
mod passed_tap;
mod persisted_policy;
mod persisted_questions;
mod persisted_vms;
mod policy_apply;
pub mod privileges;
mod process;
mod role;
mod run;
mod say;
mod serve;
mod service_manager;
mod sleep_by_snapshot;
mod snapshot_chain;
mod snapshot_folder;
mod start;
#[cfg(test)]
mod test_vm;
mod userspace;
mod vm;
mod vm_changes;

pub use self::{
    host::user_mode_dir,
    joined::attach_to_daemon,
    run::{Daemon, KeptFlows, run, run_vm},
    say::{counted, say},
    sleep_by_snapshot::SleepBySnapshot,
    snapshot_chain::{ChainError, SnapshotChain},
    snapshot_folder::{FolderTaken, SnapshotFolder},
    userspace::{
        ExecConfig, GuestSocket, Inside, SocketConfig, attach_socket, exec, run_inside,
        run_userspace_vm,
    },
    vm::{EXIT_USAGE, MachineRecord, check_machines_dir, exit_status, machines_dir},
};

use std::{io, path::Path};

use slipgate_control::{Paths, paths::netns_inode};

/// Name of the daemon's control socket in the run-time directory of its network namespace. The
/// sockets of other brokers are named by their rows.
pub const DAEMON_SOCKET: &str = "daemon.sock";

/// The pins and run-time files of this network namespace under `--pin-dir`; of a user who is not root,
/// and gives none: the files of memory of this user's `slipgate exec` and `attach --socket`.
///
/// # Errors
/// It can't be found out which network namespace this is, or another user can write to the files of
/// memory.
pub fn paths(pin_dir: &Path) -> slipgate_control::Result<Paths> {
    match userspace::memory_base(pin_dir) {
        Some(base) => {
            let paths = Paths::in_memory(&base)?;
            match host::check_private(&paths.run_dir) {
                Err(answer) if answer.kind() != io::ErrorKind::NotFound => {
                    let what = "use the tables".to_owned();
                    Err(slipgate_control::Error::Os { what, answer })
                }
                _ => Ok(paths),
            }
        }
        None => Paths::with_pin_dir(pin_dir.join(netns_inode()?.to_string())),
    }
}
