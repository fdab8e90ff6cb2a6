//! `slipgate-demo`: what `cargo xtask run` shows. A private world with a Linux guest behind a TAP,
//! slipgate attached to it, traffic, and a report. It ends with 0 only if everything it shows is
//! as it should be.

mod progress;
mod report;
mod stage;
mod workload;

use std::process::ExitCode;

use slipgate_testbed::{Result, requirements};

use self::{progress::Progress, stage::Stage};

fn main() -> ExitCode {
    if let Err(why) = requirements::root_and_tun() {
        eprintln!("slipgate-demo can't run here: {why}");
        return ExitCode::FAILURE;
    }
    match run() {
        Ok(0) => ExitCode::SUCCESS,
        Ok(wrong) => {
            eprintln!("slipgate-demo: {wrong} of its checks failed");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("slipgate-demo: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Returns how many checks failed.
fn run() -> Result<usize> {
    let mut progress = Progress::start();
    progress.title("slipgate: a guest behind a TAP, its NAT, and what became of each packet");
    let mut stage = Stage::set_up(&mut progress)?;
    let seen = workload::run(&stage, &mut progress)?;
    report::print(&stage, &seen, &mut progress)?;
    stage.tear_down(&mut progress)?;
    Ok(progress.finish())
}
