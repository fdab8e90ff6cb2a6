//! `slipgate-rig-init`: the init of the rig's machines. As process 1 it mounts, loads the modules,
//! starts itself again for the checks, and ends the machine; the checks report by lines.
//!
//! ```text
//! ok      NAME     TIME  WHAT WAS SEEN
//! FAILED  NAME     TIME  WHY
//! ```

mod boot;
mod checks;
mod disk;
mod disk_guest;
mod limits;
mod mount;
mod moved;
mod nested;
mod saved;
mod static_keys;
mod stuck;

use std::{env, process::ExitCode};

/// The argument that makes it the child of itself.
const CHECKS: &str = "checks";

fn main() -> ExitCode {
    if env::args().nth(1).as_deref() == Some(CHECKS) {
        let well = boot::given()
            .or_else(nested::run)
            .or_else(moved::run)
            .or_else(saved::run)
            .or_else(disk::run)
            .unwrap_or_else(checks::run);
        return match well {
            true => ExitCode::SUCCESS,
            false => ExitCode::FAILURE,
        };
    }
    if std::process::id() != 1 {
        eprintln!("slipgate-rig-init is the init of machines that the test `kernels` boots");
        return ExitCode::FAILURE;
    }
    disk_guest::run_if_wanted();
    boot::run()
}
