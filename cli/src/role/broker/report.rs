//! `--report`: how a VM ended, as one JSON object.
use std::{
    fs::{File, Metadata, OpenOptions},
    io::Write as _,
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::Path,
};

use anyhow::Context as _;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use serde::Serialize;

use crate::{
    config::{MachineSpec, RunConfig},
    show::stats::VmStats,
};
use slipgate_policy::document::ConfigError;

/// How it all ended.
#[derive(Debug, Serialize)]
pub(super) struct Report<'a> {
    pub(super) name: &'a str,
    pub(super) tap: &'a str,
    pub(super) machine: &'a MachineSpec,
    #[serde(flatten)]
    pub(super) how: How,
    pub(super) exit_code: u8,
    /// From the start of the command to the guest's first instruction, µs.
    pub(super) prepared_us: Option<u64>,
    /// From there to the end of the first line on its console, µs.
    pub(super) first_line_us: Option<u64>,
    /// From there to its end, µs.
    pub(super) ran_us: Option<u64>,
    /// The machine's counters; none when it was killed.
    pub(super) vmm: Option<serde_json::Value>,
    /// What `slipgate stats` shows of the VM.
    pub(super) nat: Option<VmStats>,
}

/// What ended it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case", tag = "outcome")]
pub(super) enum How {
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
    },
}

impl<'a> Report<'a> {
    /// Of a VM that never ran.
    pub(super) fn not_started(config: &'a RunConfig, error: &anyhow::Error) -> Self {
        let exit_code = crate::exit_status(error);
        let vm = &config.nat.vms[0];
        Self {
            name: &vm.name,
            tap: &vm.tap,
            machine: &config.machine,
            how: How::NotStarted {
                status: exit_code,
                why: format!("{error:#}"),
            },
            exit_code,
            prepared_us: None,
            first_line_us: None,
            ran_us: None,
            vmm: None,
            nat: None,
        }
    }
}

/// Where it is written.
#[derive(Debug)]
pub(super) struct ReportFile(File);

impl ReportFile {
    /// Opens and empties it, unless it is one of the files that are named by other flags.
    pub(super) fn open(path: &Path, others: &[(&'static str, &File)]) -> Result<Self, ConfigError> {
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

    pub(super) fn write(&mut self, report: &Report<'_>) -> anyhow::Result<()> {
        let mut json = serde_json::to_vec_pretty(report)?;
        json.push(b'\n');
        self.0.write_all(&json).context("writing the report")
    }
}
