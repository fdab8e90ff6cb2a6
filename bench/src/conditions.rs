//! Conditions of the measurements: machine, programs and settings.

use std::{fs, process::Command};

use anyhow::Result;
use serde::{Deserialize, Serialize};
use slipgate_testbed::NetNs;

use crate::{
    contender::MTU,
    generator::SMALL_FRAME_BYTES,
    machine::{Pinning, cpus, kernel},
    workload::Limits,
};

/// The conditions of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Conditions {
    /// Date and time, UTC.
    pub(crate) date: String,
    pub(crate) kernel: String,
    pub(crate) cpu: String,
    pub(crate) cpus: usize,
    /// Whether the CPUs are a hypervisor's.
    pub(crate) virtual_machine: bool,
    /// Runnable tasks in the minute before: above 0.5, other programs disturbed the measurements.
    pub(crate) load_before: f64,
    pub(crate) pinning: Pinning,
    pub(crate) mtu: u32,
    pub(crate) small_frame_bytes: usize,
    pub(crate) offloads: &'static str,
    /// TCP congestion control of all ends and relays.
    pub(crate) congestion_control: String,
    /// Way in which the congestion control was set, or the reason why it was not: then the
    /// machine's own applies. Results of older runs lack it.
    #[serde(default)]
    pub(crate) congestion_control_set: String,
    pub(crate) limits: Limits,
    pub(crate) sysctl: Vec<(&'static str, String)>,
    pub(crate) commit: String,
    /// Each contender with its version.
    pub(crate) versions: Vec<(&'static str, String)>,
    /// Contenders that were not measured, with the reason.
    pub(crate) missing: Vec<(&'static str, String)>,
}

const SYSCTL: [&str; 4] = [
    "net.core.bpf_jit_enable",
    "net.core.bpf_jit_harden",
    "net.netfilter.nf_conntrack_max",
    "kernel.bpf_stats_enabled",
];

impl Conditions {
    pub(crate) fn now(pinning: Pinning, limits: Limits, congestion_control: &str) -> Conditions {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let field = |name: &str| {
            let line = cpuinfo.lines().find(|line| line.starts_with(name));
            line.and_then(|line| line.split_once(':'))
                .map(|(_, value)| value.trim().to_owned())
        };
        let flags = field("flags").unwrap_or_default();
        Conditions {
            date: asked("date", &["--utc", "+%Y-%m-%d %H:%M:%S"]),
            kernel: kernel(),
            cpu: field("model name").unwrap_or_else(|| "unknown".into()),
            cpus: cpus(),
            virtual_machine: flags.split(' ').any(|flag| flag == "hypervisor"),
            load_before: load(),
            pinning,
            mtu: MTU,
            small_frame_bytes: SMALL_FRAME_BYTES,
            offloads: "TAP: checksum, TSO, USO by virtio_net_hdr; uplink veth: checksum, TSO, GSO; \
                       pasta and slirp4netns have none on their TAP",
            congestion_control: congestion_control.to_owned(),
            congestion_control_set: set_by(congestion_control),
            limits,
            sysctl: SYSCTL.into_iter().filter_map(sysctl).collect(),
            commit: asked(
                "git",
                &[
                    "-C",
                    env!("CARGO_MANIFEST_DIR"),
                    "describe",
                    "--always",
                    "--dirty",
                ],
            ),
            versions: Vec::new(),
            missing: Vec::new(),
        }
    }

    /// Notes the version of a contender, or why it is missing. Returns whether it is there.
    pub(crate) fn note(&mut self, contender: &'static str, version: Result<String>) -> bool {
        let is_there = version.is_ok();
        match version {
            Ok(version) => self.versions.push((contender, version)),
            Err(why) => self.missing.push((contender, format!("{why:#}"))),
        }
        is_there
    }
}

/// Returns the way in which a namespace is given a congestion control on this machine.
fn set_by(congestion_control: &str) -> String {
    let tried = NetNs::new("tried").and_then(|ns| ns.set_congestion_control(congestion_control));
    match tried {
        Ok(by) => by.to_string(),
        Err(why) => format!("NOT SET, streams have the machine's own: {why}"),
    }
}

/// Returns the load average over a minute.
fn load() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let first = text.split(' ').next().and_then(|field| field.parse().ok());
    first.unwrap_or(f64::NAN)
}

fn sysctl(key: &'static str) -> Option<(&'static str, String)> {
    let value = fs::read_to_string(format!("/proc/sys/{}", key.replace('.', "/"))).ok()?;
    Some((key, value.trim().to_owned()))
}

/// Returns the output of a program; "unknown" if it is not installed.
fn asked(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output();
    let said = output
        .ok()
        .filter(|output| output.status.success())
        .map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    said.unwrap_or_else(|| "unknown".into())
}
