//! `slipgate-demo`: what `cargo xtask run` shows. A private world, a guest in it behind slipgate's
//! NAT, traffic, and a report. It ends with 0 only if everything it shows is as it should be.
//!
//! The guest is a microVM under `slipgate run`; `--guest linux`, or a machine without KVM, makes it
//! one of network namespaces, served by `slipgate attach`.

mod flow_table;
mod linux;
mod microvm;
mod progress;

use std::process::ExitCode;

use slipgate_testbed::requirements;

use self::progress::Progress;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    if let Err(why) = requirements::root_and_tun() {
        eprintln!("slipgate-demo can't run here: {why}");
        return ExitCode::FAILURE;
    }
    let run = match (words.as_slice(), requirements::kvm()) {
        ([], Ok(())) | (["--guest", "microvm"], _) => microvm::run,
        ([], Err(why)) => {
            eprintln!("slipgate-demo: no microVM, but a guest of network namespaces: {why}");
            linux::run
        }
        (["--guest", "linux"], _) => linux::run,
        _ => {
            eprintln!("usage: slipgate-demo [--guest microvm|linux]");
            return ExitCode::from(2);
        }
    };
    let mut progress = Progress::start();
    match run(&mut progress) {
        Ok(()) if progress.finish() == 0 => ExitCode::SUCCESS,
        Ok(()) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("slipgate-demo: {error}");
            ExitCode::FAILURE
        }
    }
}
