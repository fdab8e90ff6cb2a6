//! `--report`: how a VM ended, as one JSON object.
use std::{
    fs::{File, Metadata, OpenOptions},
    io::Write as _,
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::Path,
    time::Duration,
};

use anyhow::Context as _;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use serde::Serialize;
use slipgate_ipc::{client::VmDefinition, vmm::GuestEnd};
use slipgate_policy::document::{ConfigError, Quotas};

use crate::{
    asking::StoppedEarly,
    config::{Config, MachineSpec, Mode, RunConfig},
    counted, say,
};

/// How it all ended.
#[derive(Debug, Serialize)]
pub(crate) struct Report<'a, N> {
    pub(crate) name: &'a str,
    /// The TAP of a VM that has one.
    pub(crate) tap: Option<&'a str>,
    pub(crate) machine: &'a MachineSpec,
    #[serde(flatten)]
    pub(crate) how: How,
    pub(crate) exit_code: u8,
    /// From the start of the command to the guest's first instruction, µs.
    pub(crate) prepared_us: Option<u64>,
    /// Parts of that time; `None` if the guest did not run.
    pub(crate) stages: Option<Stages>,
    /// Time from there to the end of the first line on its console, µs.
    pub(crate) first_line_us: Option<u64>,
    /// Time from there to the guest's end, µs.
    pub(crate) ran_us: Option<u64>,
    /// What the VM of a restored machine has to the network; `None`: it was booted.
    pub(crate) inherits: Option<&'a Inherits>,
    /// Number of times that the machine began anew after a reset.
    pub(crate) restarts: u64,
    /// The machine's counters; none when it was killed.
    pub(crate) vmm: Option<serde_json::Value>,
    /// Counters that `slipgate stats` shows for the VM.
    pub(crate) nat: Option<N>,
}

/// Parts of the time until the guest's first instruction, µs. Those of the VMM's process go on beside
/// [`Stages::served_us`] where a snapshot is restored.
#[derive(Clone, Copy, Default, Debug, Serialize)]
pub(crate) struct Stages {
    /// Until the VMM was told of its machine: its process started, flags and files read, the TAP made.
    pub(crate) opened_us: u64,
    /// Of that, starting the VMM's process, which then confines itself beside the rest.
    pub(crate) started_us: u64,
    /// The VMM's own: from its first instruction until it was confined, and making the machine and its
    /// threads, once it was told of them.
    pub(crate) confined_us: u64,
    pub(crate) made_us: u64,
    /// From the start of its process until the machine was made, as seen from here.
    pub(crate) ready_us: u64,
    /// Until the TAP was served by the daemon, or by processes of its own.
    pub(crate) served_us: u64,
}

/// What the VM of a restored machine has to the network.
#[derive(Debug, Serialize)]
pub(crate) struct Inherits {
    /// Whether it is another VM than the one that was saved, or that one.
    vm: Which,
    /// Name of its policy; `None`: the one without a name, or one of its own.
    policy: Option<String>,
    /// Whether it has rules of its own.
    own_rules: bool,
    /// Its forwards.
    forwards: Vec<String>,
    /// Quotas given for it, which replace those of its policy.
    quotas: Quotas,
    /// Whether its flows go on, and whether names that DNS had opened are open.
    flows: bool,
    names: bool,
}

/// Which VM a restored machine is to the network.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum Which {
    New,
    Same,
}

impl Inherits {
    /// Those of a VM that is new to the network.
    pub(crate) fn of_new(vm: &VmDefinition) -> Self {
        Self {
            vm: Which::New,
            policy: vm.policy.clone(),
            own_rules: vm.inline_policy.is_some(),
            forwards: vm.forwards.clone(),
            quotas: vm.quotas,
            flows: false,
            names: false,
        }
    }

    /// Those of a VM that a daemon keeps. `flows`: whether its flows go on.
    pub(crate) fn of_kept(vm: &VmDefinition, flows: bool) -> Self {
        Self {
            vm: Which::Same,
            flows,
            names: true,
            ..Self::of_new(vm)
        }
    }

    /// Those of the VM of a command with processes of its own.
    pub(crate) fn of_own(nat: &Config) -> Self {
        let vm = &nat.vms[0];
        let own = vm.flags.quotas;
        let of_all = nat.flags.quotas;
        let mut forwards: Vec<String> = nat.forwards.iter().map(|it| it.spec.clone()).collect();
        forwards.dedup();
        Self {
            own_rules: !nat.flags.rules.is_empty() || nat.flags.default.is_some(),
            ..Self::of_new(&VmDefinition {
                policy: vm.policy.clone(),
                forwards,
                quotas: own.or(of_all),
                ..VmDefinition::default()
            })
        }
    }

    /// Says it in a line.
    pub(crate) fn log(&self, name: &str) {
        let policy = match (&self.policy, self.own_rules) {
            (Some(policy), false) => format!("the policy {policy}"),
            (Some(policy), true) => format!("the policy {policy} with rules of its own"),
            (None, true) => "rules of its own".to_owned(),
            (None, false) => "the default policy".to_owned(),
        };
        let quotas = match self.quotas == Quotas::default() {
            true => "the quotas of that policy",
            false => "quotas of its own",
        };
        let forwards = counted(self.forwards.len() as u64, "forward");
        let rest = match (self.vm, self.flows) {
            (Which::New, _) => "no flow and no open name of the saved one",
            (Which::Same, true) => "its flows and open names go on",
            (Which::Same, false) => "its open names go on, its flows have ended",
        };
        let is = match self.vm {
            Which::New => "a new VM to the network",
            Which::Same => "the VM that it was to the network",
        };
        tracing::info!("{name} is {is}: {policy}, {quotas}, {forwards}; {rest}");
    }
}

/// Returns a time in µs, as the report states it.
pub(crate) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Outcome of a run.
#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case", tag = "outcome")]
pub(crate) enum How {
    /// The command's exit status, and why.
    NotStarted {
        #[serde(skip)]
        status: u8,
        why: String,
    },
    PoweredOff,
    Reset,
    Exited {
        status: u8,
    },
    Crashed {
        report: String,
    },
    Stopped {
        signal: i32,
    },
    VmmKilled {
        how: String,
    },
    NatFailed {
        why: String,
        /// Whether the VM's flows are left in the kernel.
        #[serde(skip)]
        leaves_flows: bool,
    },
}

impl<'a, N> Report<'a, N> {
    /// Makes the report of a VM that never ran.
    pub(crate) fn not_started(config: &'a RunConfig, error: &anyhow::Error) -> Self {
        let exit_code = exit_status(error);
        let vm = &config.nat.vms[0];
        Self {
            name: &vm.name,
            tap: (config.nat.mode != Mode::Userspace).then_some(&*vm.tap),
            machine: &config.machine,
            how: How::NotStarted {
                status: exit_code,
                why: format!("{error:#}"),
            },
            exit_code,
            prepared_us: None,
            stages: None,
            first_line_us: None,
            ran_us: None,
            inherits: None,
            restarts: 0,
            vmm: None,
            nat: None,
        }
    }
}

/// Where it is written.
#[derive(Debug)]
pub(crate) struct ReportFile(File);

impl ReportFile {
    /// Opens and empties it, unless it is one of the files that are named by other flags.
    pub(crate) fn open(path: &Path, others: &[(&'static str, &File)]) -> Result<Self, ConfigError> {
        let refused = |problem: String, remedy: &str| {
            ConfigError::new("--report", path.display(), problem, remedy)
        };
        let unusable = |e: std::io::Error| {
            let remedy = "give a file in a directory that is there";
            refused(format!("it can't be written ({e})"), remedy)
        };
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            // A FIFO without a reader is not waited for.
            .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(path)
            .map_err(unusable)?;
        let data = file.metadata().map_err(unusable)?;
        let is_same = |other: &Metadata| (other.dev(), other.ino()) == (data.dev(), data.ino());
        for (flag, other) in others {
            if other.metadata().is_ok_and(|other| is_same(&other)) {
                let problem = format!("{flag} names the same file");
                return Err(refused(problem, "give it a file of its own"));
            }
        }
        if data.is_file() {
            file.set_len(0).map_err(unusable)?;
        }
        // Its reader is waited for.
        let waits = fcntl(&file, FcntlArg::F_SETFL(OFlag::empty()));
        waits.map_err(|e| unusable(e.into()))?;
        Ok(Self(file))
    }

    pub(crate) fn write(&mut self, report: &Report<'_, impl Serialize>) -> anyhow::Result<()> {
        let mut json = serde_json::to_vec_pretty(report)?;
        json.push(b'\n');
        self.0.write_all(&json).context("writing the report")
    }
}

/// Exit status of a command line that can't be used, as clap has it: flags, or the files and
/// devices that they name.
pub const EXIT_USAGE: u8 = 2;

/// Exit statuses: see the help of `slipgate run`.
mod status {
    pub(super) const FAILURE: u8 = 1;
    pub(crate) const RESET: u8 = 120;
    pub(crate) const CRASHED: u8 = 121;
    pub(crate) const VMM_KILLED: u8 = 122;
    pub(crate) const NAT_FAILED: u8 = 123;
    /// And the signal's number, as a shell has it.
    pub(crate) const SIGNAL: u8 = 128;
}

impl How {
    pub(crate) fn of(end: &GuestEnd) -> Self {
        match end {
            GuestEnd::PoweredOff => Self::PoweredOff,
            GuestEnd::Reset => Self::Reset,
            GuestEnd::Exited { status } => Self::Exited { status: *status },
            GuestEnd::Crashed { report } => Self::Crashed {
                report: report.clone(),
            },
            // Unasked: the VMM took a lost channel for a request.
            GuestEnd::Stopped => Self::VmmKilled {
                how: "stopped by itself".into(),
            },
        }
    }

    /// Its name in the report.
    pub(crate) fn name(&self) -> String {
        let value = serde_json::to_value(self).unwrap_or_default();
        value["outcome"].as_str().unwrap_or_default().to_owned()
    }

    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::NotStarted { status, .. } => *status,
            Self::PoweredOff => 0,
            Self::Exited { status } => *status,
            Self::Reset => status::RESET,
            Self::Crashed { .. } => status::CRASHED,
            Self::VmmKilled { .. } => status::VMM_KILLED,
            Self::NatFailed { .. } => status::NAT_FAILED,
            Self::Stopped { signal } => status::SIGNAL + (*signal as u8 & 0x7f),
        }
    }

    /// Logs the outcome of the VM. A crash and failures of slipgate are printed at any log level;
    /// an error before the start is the command's own.
    pub(crate) fn log(&self, name: &str) {
        match self {
            // The command's own error.
            Self::NotStarted { .. } => {}
            Self::PoweredOff => tracing::info!("{name} powered off"),
            Self::Exited { status: 0 } => tracing::info!("{name} ended with status 0"),
            Self::Exited { status } => tracing::warn!("{name} ended with status {status}"),
            Self::Reset => tracing::warn!("{name} reset itself, which ends the run"),
            // Lines of their own, whatever the level of messages.
            Self::Crashed { report } => say(format_args!("{name}: {}", printable(report))),
            Self::Stopped { .. } => tracing::info!("{name} was stopped"),
            Self::VmmKilled { how } => say(format_args!("the VMM of {name} {}", printable(how))),
            Self::NatFailed {
                why,
                leaves_flows: false,
            } => say(format_args!(
                "{why}; {name} was stopped, for nobody would carry its packets"
            )),
            Self::NatFailed { why, .. } => say(format_args!(
                "{why}; {name} was stopped, for nobody would admit its flows. Those it \
                 had are left in the kernel: the next `slipgate run --name {name}` ends them"
            )),
        }
    }
}

/// The exit status of a command that failed, or that a signal stopped at its beginning.
pub fn exit_status(error: &anyhow::Error) -> u8 {
    if let Some(StoppedEarly { signal }) = error.downcast_ref() {
        return status::SIGNAL + (*signal as u8 & 0x7f);
    }
    match error.is::<ConfigError>() {
        true => EXIT_USAGE,
        false => status::FAILURE,
    }
}

/// Without control characters: it comes from a process that a guest may have taken over.
pub(crate) fn printable(text: &str) -> String {
    let keep = |c: char| if c.is_control() && c != '\n' { '?' } else { c };
    text.chars().map(keep).collect()
}
