//! `slipgate-demo`: what `cargo xtask run` shows. A private world, a guest in it behind slipgate's
//! NAT, traffic, and a report. It ends with 0 only if everything it shows is as it should be.
//!
//! The guest is a microVM under `slipgate run`; `--guest linux`, or a machine without KVM, makes it
//! one of network namespaces, served by `slipgate attach`. With `--mode userspace` the microVM is one of
//! a user without privileges: of one that root makes up, or, in a user and a network namespace of its own,
//! of who runs this.

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
    let mut wants = Wants::default();
    for pair in words.chunks(2) {
        match pair {
            ["--guest", "microvm"] => wants.microvm = true,
            ["--guest", "linux"] => wants.linux = true,
            ["--mode", "hybrid"] => {}
            ["--mode", "userspace"] => wants.userspace = true,
            _ => return usage(),
        }
    }
    if wants.linux && wants.userspace {
        return usage();
    }
    let can_run = match wants.userspace {
        true => requirements::networks().and_then(|()| requirements::kvm()),
        false => requirements::root_and_tun(),
    };
    if let Err(why) = can_run {
        eprintln!("slipgate-demo can't run here: {why}");
        return ExitCode::FAILURE;
    }
    let run = match (wants, requirements::kvm()) {
        (Wants { linux: true, .. }, _) => linux::run,
        (
            Wants {
                userspace: true, ..
            },
            _,
        ) => microvm::run_userspace,
        (Wants { microvm: true, .. }, _) | (_, Ok(())) => microvm::run_hybrid,
        (_, Err(why)) => {
            eprintln!("slipgate-demo: no microVM, but a guest of network namespaces: {why}");
            linux::run
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

/// Options of the demo's command line.
#[derive(Clone, Copy, Default)]
struct Wants {
    microvm: bool,
    linux: bool,
    userspace: bool,
}

fn usage() -> ExitCode {
    eprintln!("usage: slipgate-demo [--guest microvm|linux] [--mode hybrid|userspace]");
    eprintln!("a guest of network namespaces (linux) has no user mode");
    ExitCode::from(2)
}
