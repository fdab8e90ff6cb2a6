//! `cargo xtask run`: the demonstration in its private world, or slipgate itself on this machine.

use std::{convert::Infallible, os::unix::process::CommandExt, process::Command};

use anyhow::{Context, Result};
use clap::{Arg, ArgMatches};

use crate::{
    compile, privilege, setup, words,
    workspace::{Workspace, run as run_to_end},
};

/// What to show, or to run.
#[derive(Debug)]
pub(crate) struct Run {
    guest: Option<String>,
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
                Arg::new("guest")
                    .long("guest")
                    .value_name("KIND")
                    .value_parser(["microvm", "linux"])
                    .conflicts_with("args")
                    .help(
                        "What the guest is: microvm, or linux (network namespaces) [default: microvm \
                         where there is KVM]",
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
            guest: matches.get_one("guest").cloned(),
            args: words(matches, "args"),
        }
    }
}

/// As fast where packets are, and built in a fraction of a release's time.
const PROFILE: &str = "quick";

/// Builds, then becomes the program, so that signals and exit status are the program's own.
pub(crate) fn run(workspace: &Workspace, what: &Run) -> Result<Infallible> {
    let is_demo = what.args.is_empty();
    compile::artefacts(workspace, || match is_demo {
        true => {
            setup::test_tools()?;
            build(
                workspace,
                &["--package=slipgate-testbed", "--bin=slipgate-demo"],
            )
        }
        false => Ok(()),
    })?;
    build(workspace, &["--package=slipgate"])?;
    let folder = workspace.target.join(PROFILE);
    let slipgate = folder.join("slipgate");
    if !is_demo {
        return become_program(privilege::as_root(&slipgate)?.args(&what.args));
    }
    let demo = folder.join("slipgate-demo");
    let mut demo = privilege::as_root_with_environment(&demo)?;
    demo.env("SLIPGATE_BIN", slipgate);
    if let Some(guest) = &what.guest {
        demo.args(["--guest", guest]);
    }
    become_program(&mut demo)
}

fn build(workspace: &Workspace, what: &[&str]) -> Result<()> {
    let profile = ["build", "--profile", PROFILE];
    run_to_end(workspace.cargo().args(profile).args(what))
}

/// Replaces xtask.
pub(crate) fn become_program(command: &mut Command) -> Result<Infallible> {
    let why = command.exec();
    Err(why).with_context(|| format!("could not start {}", command.get_program().display()))
}
