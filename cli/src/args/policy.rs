//! Command line of `slipgate policy`: check, explain, compare and learn policies.
use std::{path::PathBuf, time::Duration};

use clap::{Args, Subcommand};

use super::{ApplyArgs, DEFAULT_PIN_DIR, Proto};

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
    /// Give `slipgate serve` a named policy, and put it in force
    Put(PutArgs),
    /// Take a named policy back that `put` gave and no VM uses
    Rm(RemovePolicyArgs),
    /// Print the JSON schema of policy files
    Schema,
}

#[derive(Args, Debug)]
pub(crate) struct PutArgs {
    /// The policy's name, which VMs give by --policy
    pub(crate) name: String,
    /// TOML with the keys of [policy.NAME] in a policy file
    pub(crate) file: PathBuf,
    /// Directory in bpffs that `serve` was given
    #[arg(long, value_name = "DIR", default_value = DEFAULT_PIN_DIR)]
    pub(crate) pin_dir: PathBuf,
}

#[derive(Args, Debug)]
pub(crate) struct RemovePolicyArgs {
    /// Name of the policy
    pub(crate) name: String,
    /// Directory in bpffs that `serve` was given
    #[arg(long, value_name = "DIR", default_value = DEFAULT_PIN_DIR)]
    pub(crate) pin_dir: PathBuf,
}

#[derive(Args, Debug)]
#[command(after_help = CHECK_EXIT_STATUS)]
pub(crate) struct CheckArgs {
    /// Policy file to read
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Treat warnings as errors
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
    /// Policy file to read
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
    /// Policy file to compare with
    #[arg(value_name = "B")]
    pub(crate) after: PathBuf,
    /// Flow records, as --flow-log wrote them
    #[arg(long, value_name = "F")]
    pub(crate) flow_log: PathBuf,
    /// Consider only flows of this VM
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
#[command(after_help = LEARN_EXIT_STATUS)]
pub(crate) struct LearnArgs {
    /// The VM, which is listened to until ^C [with --flow-log: all of the log's]
    #[arg(value_name = "VM", required_unless_present = "flow_log")]
    pub(crate) vm: Option<String>,
    /// Let the VM do meanwhile whatever no rule denies, as if the default were allow; when this ends,
    /// however it ends, it has its policy again, and what that does not let in is cut
    #[arg(long, conflicts_with = "flow_log")]
    pub(crate) open: bool,
    /// Listen to nobody: learn from what was recorded by --flow-log
    #[arg(long, value_name = "F")]
    pub(crate) flow_log: Option<PathBuf>,
    /// Go on with what is recorded in the flow log from now on, until ^C
    #[arg(long, requires = "flow_log")]
    pub(crate) follow: bool,
    /// Stop by itself after so long, like 90s, 10m or 2h; a day at most
    #[arg(long = "for", alias = "seconds", value_name = "DURATION", value_parser = duration)]
    pub(crate) lasts: Option<Duration>,
    /// Directory in bpffs that `attach` was given
    #[arg(long, value_name = "DIR", default_value = DEFAULT_PIN_DIR)]
    pub(crate) pin_dir: PathBuf,
    /// Names with a parent in common become *.PARENT: to be looked through by hand
    #[arg(long)]
    pub(crate) generalise: bool,
}

const LEARN_EXIT_STATUS: &str = "\
Exit status:
  0  what is printed covers all that was seen
  1  it could not be listened to
  2  the command line or the flow log can't be used
  4  some of what was seen is not covered: records were lost, or it was too much";

/// Parses a duration in seconds, minutes or hours.
fn duration(text: &str) -> Result<Duration, String> {
    const MOST_S: u64 = 86_400;
    let units = [("s", 1), ("m", 60), ("h", 3_600)];
    let (digits, unit) = units
        .iter()
        .find_map(|(name, unit)| Some((text.strip_suffix(name)?, *unit)))
        .unwrap_or((text, 1));
    let seconds = digits.parse::<u64>().ok();
    let seconds = seconds.and_then(|number| number.checked_mul(unit));
    match seconds {
        Some(s @ 1..=MOST_S) => Ok(Duration::from_secs(s)),
        Some(_) => Err("give a second to a day".to_owned()),
        None => Err("give a number of seconds, minutes or hours, like 90s, 10m or 2h".to_owned()),
    }
}

#[cfg(test)]
#[path = "policy_test.rs"]
mod tests;
