//! `slipgate policy`: what a policy file says, would have said, and should say.
use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{ApplyArgs, Proto};

#[derive(Subcommand, Debug)]
pub(crate) enum PolicyCommand {
    /// Say what is wrong with a policy file, and what is likely meant otherwise
    Check(CheckArgs),
    /// Say what a policy file decides about a destination or a name, and by which rules
    Explain(ExplainArgs),
    /// Say what of a flow log another policy would have decided otherwise
    Diff(DiffArgs),
    /// Print the least policy that covers what was seen
    Learn(LearnArgs),
    /// Put the policy file and the deny files in force as they are now, or another policy file
    Apply(ApplyArgs),
    /// Print the JSON schema of policy files
    Schema,
}

#[derive(Args, Debug)]
#[command(after_help = CHECK_EXIT_STATUS)]
pub(crate) struct CheckArgs {
    /// The policy file
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Warnings are errors
    #[arg(long)]
    pub(crate) strict: bool,
}

const CHECK_EXIT_STATUS: &str = "\
Exit status:
  0  it can be used
  2  it can't, or there are warnings and --strict";

#[derive(Args, Debug)]
#[command(after_help = EXPLAIN_EXIT_STATUS)]
pub(crate) struct ExplainArgs {
    /// The policy file
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Where a guest would connect to: ADDRESS:PORT, NAME:PORT or NAME; for icmp the host alone
    #[arg(value_name = "DESTINATION")]
    pub(crate) destination: String,
    /// Of the named policies this one [default: the file's top level]
    #[arg(long, value_name = "NAME")]
    pub(crate) policy: Option<String>,
    /// Protocol of the flow
    #[arg(long, value_name = "P", value_enum, default_value_t = Proto::Tcp)]
    pub(crate) proto: Proto,
}

const EXPLAIN_EXIT_STATUS: &str = "\
Exit status:
  0  it would be let through
  2  the command line or the file can't be used
  3  it would be refused";

#[derive(Args, Debug)]
#[command(after_help = DIFF_EXIT_STATUS)]
pub(crate) struct DiffArgs {
    /// The policy file as it is
    #[arg(value_name = "A")]
    pub(crate) before: PathBuf,
    /// The candidate
    #[arg(value_name = "B")]
    pub(crate) after: PathBuf,
    /// What was recorded by --flow-log
    #[arg(long, value_name = "F")]
    pub(crate) flow_log: PathBuf,
    /// Only this VM's
    #[arg(long, value_name = "NAME")]
    pub(crate) vm: Option<String>,
    /// Of the named policies this one, unless [vms] says otherwise [default: the files' top level]
    #[arg(long, value_name = "NAME")]
    pub(crate) policy: Option<String>,
}

const DIFF_EXIT_STATUS: &str = "\
Exit status:
  0  both decide alike
  1  some would have been decided otherwise
  2  the command line or a file can't be used";

#[derive(Args, Debug)]
pub(crate) struct LearnArgs {
    /// The VM [default: all of the flow log's]
    #[arg(value_name = "VM")]
    pub(crate) vm: Option<String>,
    /// What was recorded by --flow-log
    #[arg(long, value_name = "F")]
    pub(crate) flow_log: PathBuf,
    /// Go on with what is recorded from now on, until stopped by ^C
    #[arg(long)]
    pub(crate) follow: bool,
    /// Stop following after so many seconds, a day at most
    #[arg(long, value_name = "N", requires = "follow",
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) seconds: Option<u64>,
    /// Names with a parent in common become *.PARENT: to be looked through by hand
    #[arg(long)]
    pub(crate) generalise: bool,
}
