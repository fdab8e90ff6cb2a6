//! `cargo xtask run`: the demonstration in a private network, or slipgate itself on this machine.

use std::{
    convert::Infallible,
    fs::File,
    io::ErrorKind,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use clap::{Arg, ArgMatches};

use crate::{
    bpf::Objects,
    compile, flag, own_namespaces, privilege, setup, words,
    workspace::{Workspace, run as run_to_end, say},
};

const USER_MODE: &str = "userspace";
const KVM: &str = "/dev/kvm";

/// Arguments of `cargo xtask run`.
#[derive(Debug)]
pub(crate) struct Run {
    no_setup: bool,
    guest: Option<String>,
    mode: Option<String>,
    args: Vec<String>,
}

impl Run {
    pub(crate) fn command() -> clap::Command {
        clap::Command::new("run")
            .about(
                "Show slipgate at work in a private network; with `-- ARGS`, run `slipgate ARGS` on \
                 this machine",
            )
            .args([
                flag("no-setup").help("Take tools, BPF objects and the built-in guest as they are"),
                Arg::new("guest")
                    .long("guest")
                    .value_name("KIND")
                    .value_parser(["microvm", "linux"])
                    .conflicts_with("args")
                    .help(
                        "What the guest is: microvm, or linux (network namespaces) [default: microvm \
                         where there is KVM]",
                    ),
                Arg::new("mode")
                    .long("mode")
                    .value_name("MODE")
                    .value_parser(["hybrid", USER_MODE])
                    .conflicts_with("args")
                    .help(
                        "Where the microVM's flows are translated: hybrid, or userspace, by a user without \
                         privileges, who needs no sudo [default: hybrid]",
                    ),
                Arg::new("args")
                    .value_name("ARGS")
                    .num_args(0..)
                    .last(true)
                    .allow_hyphen_values(true)
                    .help("What to give to slipgate"),
            ])
    }

    pub(crate) fn of(matches: &ArgMatches) -> Self {
        Self {
            no_setup: matches.get_flag("no-setup"),
            guest: matches.get_one("guest").cloned(),
            mode: matches.get_one("mode").cloned(),
            args: words(matches, "args"),
        }
    }

    fn is_of_user_mode(&self) -> bool {
        self.mode.as_deref() == Some(USER_MODE)
    }
}

/// Builds, then replaces this process with the program, so that signals and exit status are the
/// program's own.
pub(crate) fn run(workspace: &Workspace, what: &Run) -> Result<Infallible> {
    let is_demo = what.args.is_empty();
    let objects = match wants_bpf_log(&what.args) {
        true => Objects::Both,
        false => Objects::PlainUnlessBuilt,
    };
    if !what.no_setup {
        compile::artefacts(workspace, objects, || match is_demo {
            true if what.is_of_user_mode() => setup::user_mode_tools(),
            true => setup::test_tools(),
            false => Ok(()),
        })?;
    }
    let slipgate = build_quick(workspace, objects)?;
    if !is_demo {
        return become_program(privilege::as_root(&slipgate)?.args(&what.args));
    }
    let demo = slipgate.with_file_name("slipgate-demo");
    let mut demo = match what.is_of_user_mode() && !privilege::is_root() {
        true => without_root(&demo)?,
        false => privilege::as_root_with_environment(&demo)?,
    };
    demo.env("SLIPGATE_BIN", slipgate);
    for (flag, value) in [("--guest", &what.guest), ("--mode", &what.mode)] {
        if let Some(value) = value {
            demo.args([flag, value]);
        }
    }
    become_program(&mut demo)
}

/// Returns a command that runs the demonstration as this user, or through sudo where this machine refuses
/// the user what it takes, and says why.
fn without_root(demo: &Path) -> Result<Command> {
    let own = can_open_kvm().and_then(|()| own_namespaces::around(demo));
    own.or_else(|why| {
        say(format!("this takes root, and so sudo: {why:#}"));
        privilege::as_root_with_environment(demo)
    })
}

/// Whether the user may make machines, or nobody can here, which root does not change.
fn can_open_kvm() -> Result<()> {
    match File::options().read(true).write(true).open(KVM) {
        Err(why) if why.kind() == ErrorKind::PermissionDenied => Err(why).with_context(|| {
            format!("this user may not open {KVM} (to permit it: usermod -aG kvm $USER, and log in again)")
        }),
        _ => Ok(()),
    }
}

/// Says whether slipgate will load the logging programs, by a flag on its command line. A configuration
/// file that asks for them gets an error that says what to build.
fn wants_bpf_log(args: &[String]) -> bool {
    args.iter().any(|arg| arg.starts_with("--bpf-log"))
}

/// Builds slipgate and the demonstration with the profile `quick`. Returns the path of slipgate.
/// Both are always built together: separately they would use different features of their
/// dependencies, which would then be recompiled.
pub(crate) fn build_quick(workspace: &Workspace, objects: Objects) -> Result<PathBuf> {
    let mut cargo = workspace.cargo();
    if objects == Objects::PlainUnlessBuilt {
        cargo.env("SLIPGATE_NO_BPF_LOG", "1");
    }
    run_to_end(cargo.args([
        "build",
        "--profile=quick",
        "--package=slipgate",
        "--bin=slipgate",
        "--package=slipgate-testbed",
        "--bin=slipgate-demo",
    ]))?;
    Ok(workspace.target.join("quick/slipgate"))
}

/// Replaces this process with the command (`exec`).
pub(crate) fn become_program(command: &mut Command) -> Result<Infallible> {
    let why = command.exec();
    Err(why).with_context(|| format!("could not start {}", command.get_program().display()))
}

#[cfg(test)]
#[path = "run_test.rs"]
mod tests;
