//! The flags of `slipgate run`.
use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{ApiArgs, NatArgs};

#[derive(Args, Debug)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct RunArgs {
    /// Kernel to boot: a bzImage, a vmlinux, or any ELF with a PVH note [default: the built-in
    /// guest]
    #[arg(long, value_name = "FILE")]
    pub(crate) kernel: Option<PathBuf>,
    /// Initial RAM disk for the kernel
    #[arg(long, value_name = "FILE")]
    pub(crate) initrd: Option<PathBuf>,
    /// Go on from this directory, which `slipgate snapshot` wrote, in the place of booting: its
    /// machine, as a new VM to the network, or with --as as the one that it was; the flags of the NAT
    /// are not the snapshot's
    #[arg(long, value_name = "DIR", conflicts_with_all = ["kernel", "initrd", "cmdline", "cpus", "memory", "queues", "mac", "balloon", "huge_pages", "cpu_template"])]
    pub(crate) restore: Option<PathBuf>,
    /// A disk: a raw image or a block device, which the guest may write to without ,ro; may be given
    /// several times; with --restore: other files in the place of the snapshot's. cache= says when its
    /// writes are stable: writeback (with the guest's flush), writethrough (each before its answer) or
    /// unsafe (when the host likes); none is as writeback, without the host's page cache. iops= and
    /// bandwidth= limit its requests and bytes: N[/TIME][+BURST], like 1000 (a second), 10M/100ms,
    /// 10M+200M (200M more once, at the beginning)
    #[arg(long, value_name = "FILE[,ro][,cache=MODE][,iops=N][,bandwidth=BYTES]")]
    pub(crate) disk: Vec<String>,
    /// Stream connections between guest and host (vsock): the guest's address, from 3 on, and the
    /// path of a Unix socket, to which programs connect and write `CONNECT PORT`; the guest's own
    /// connections to port P go to the program that listens at SOCKET_P; with --restore: another one
    /// in the place of the snapshot's
    #[arg(long, value_name = "CID,SOCKET")]
    pub(crate) vsock: Option<String>,
    /// A balloon, by which the guest gives memory back to the host: what it has free, and MIB more (or
    /// with a unit, like 1G), which it is asked for at the beginning; `slipgate balloon` changes that
    #[arg(long, value_name = "MIB", num_args = 0..=1, default_missing_value = "0", value_parser = mebibytes, allow_negative_numbers = true)]
    pub(crate) balloon: Option<u64>,
    /// The kernel's command line; the built-in guest's is its work, like "dns example.com; crr
    /// 192.0.2.1:80 100" [default: selftest; for a kernel: console=ttyS0 panic=-1]
    #[arg(long, value_name = "TEXT")]
    pub(crate) cmdline: Option<String>,
    /// Virtual CPUs, 1 to 32
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole_number, allow_negative_numbers = true)]
    pub(crate) cpus: u32,
    /// Memory, MiB; or with a unit, like 2G
    #[arg(long, value_name = "MIB", default_value_t = 512, value_parser = mebibytes, allow_negative_numbers = true)]
    pub(crate) memory: u64,
    /// CPU that the guest is told of: the host's, or one that is the same on every host of a vendor
    /// which has its features, so that a snapshot can be restored on each of them
    #[arg(long, value_name = "NAME", default_value = "host")]
    pub(crate) cpu_template: CpuTemplate,
    /// Have the memory in huge pages of 2 MiB, of which the host needs enough that are free: all are
    /// reserved at the start
    #[arg(long)]
    pub(crate) huge_pages: bool,
    /// Queue pairs of the network card, 1 to 16 [default: as many as virtual CPUs; in user mode
    /// one, and no more]
    #[arg(long, value_name = "N", value_parser = whole_number, allow_negative_numbers = true)]
    pub(crate) queues: Option<u32>,
    /// Most that the guest sends: N[/TIME][+BURST] as for a disk; what is more waits in the guest
    #[arg(long, value_name = "bandwidth=BYTES[,packets=N]")]
    pub(crate) net_rate_tx: Option<String>,
    /// Most that the guest receives; what is more waits in the TAP
    #[arg(long, value_name = "bandwidth=BYTES[,packets=N]")]
    pub(crate) net_rate_rx: Option<String>,
    /// Be the machine of this VM, which `slipgate serve` keeps (`slipgate vm add`, `slipgate vm keep`,
    /// `slipgate snapshot --sleep`): on its TAP, with its name, forwards, policy and quotas, and with
    /// --restore its flows too, which go on; the VM stays when the machine ends. A VM that slept wakes
    #[arg(long = "as", value_name = "NAME", conflicts_with_all = ["name", "tap", "mac", "own"])]
    pub(crate) as_vm: Option<String>,
    /// With --as and --restore: end the VM's flows before its guest runs, and tell both ends
    #[arg(long, requires_all = ["as_vm", "restore"])]
    pub(crate) generation: bool,
    /// Name for the TAP, which is made and goes with the VM; in user mode there is none [default:
    /// sgvmN]
    #[arg(long, value_name = "IF")]
    pub(crate) tap: Option<String>,
    /// The VM's name in flows, stats and rules [default: the TAP's, or run-PID]
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// The guest's MAC, and frames from another are dropped [default: 02:53:4c:47:00:02, and the
    /// guest may change it]
    #[arg(long, value_name = "MAC")]
    pub(crate) mac: Option<String>,
    /// Write how it ended, times and counters to this file, as one JSON object
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,
    /// Whether to run where the host lacks a namespace of the VMM's jail: auto runs and says what is
    /// missing, required refuses
    #[arg(long, value_name = "HOW", default_value = "auto")]
    pub(crate) jail: Jail,
    /// Reaction to a reset by the guest (a reboot, a panic that reboots, a triple fault): exit ends
    /// the run with status 120, restart begins the machine anew, and ends its flows
    #[arg(long, value_name = "HOW", default_value = "exit")]
    pub(crate) on_reboot: OnReboot,
    /// Make a cgroup (v2) for the VMM in this one, which has no processes of its own and is yours: a
    /// path, or one from the mount point
    #[arg(long, value_name = "DIR")]
    pub(crate) cgroup: Option<PathBuf>,
    /// Most CPU time of the VMM, in percent of one CPU: 250 is two and a half CPUs
    #[arg(long, value_name = "PERCENT", value_parser = whole_number, requires = "cgroup", allow_negative_numbers = true)]
    pub(crate) cpu_max: Option<u32>,
    /// Most memory of the VMM, the guest's included, bytes; or with a unit: K, M, G. Beyond it the VMM
    /// is killed
    #[arg(long, value_name = "BYTES", value_parser = bytes, requires = "cgroup", allow_negative_numbers = true)]
    pub(crate) memory_max: Option<u64>,
    /// Most of the VMM's memory that is swapped out, bytes; or with a unit; 0: none
    #[arg(long, value_name = "BYTES", value_parser = bytes, requires = "cgroup", allow_negative_numbers = true)]
    pub(crate) swap_max: Option<u64>,
    /// Most threads of the VMM: one for each CPU, queue pair and queue of a disk
    /// (one for each CPU, up to 8, and up to four more of the kernel's while it flushes), and some ten
    /// more
    #[arg(long, value_name = "N", value_parser = whole_number, requires = "cgroup", allow_negative_numbers = true)]
    pub(crate) pids_max: Option<u32>,
    /// Most that the guest prints to a console that is a file, bytes; or with a unit: K, M, G. What
    /// comes after it is lost, and counted
    #[arg(long, value_name = "BYTES", default_value = "64M", value_parser = bytes, allow_negative_numbers = true)]
    pub(crate) console_limit: u64,
    /// Start processes of its own beside those of `slipgate serve`, which else serves the VM
    #[arg(long)]
    pub(crate) own: bool,
    #[command(flatten)]
    pub(crate) api: ApiArgs,
    #[command(flatten)]
    pub(crate) nat: NatArgs,
}

/// Whether the jail is required.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Debug)]
pub(crate) enum Jail {
    Auto,
    Required,
}

/// CPU that a guest is told of.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Debug)]
pub(crate) enum CpuTemplate {
    Host,
    #[value(name = "x86-64-v1")]
    X86_64V1,
    #[value(name = "x86-64-v2")]
    X86_64V2,
    #[value(name = "x86-64-v3")]
    X86_64V3,
}

/// Reaction to a reset by the guest.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Debug)]
pub(crate) enum OnReboot {
    Exit,
    Restart,
}

/// Parses a whole number. [`crate::config`] checks the limits.
fn whole_number(text: &str) -> Result<u32, String> {
    let number = text.parse();
    number.map_err(|_| "give a whole number, like 2".into())
}

/// `1024`, `1024M` or `1G`, in MiB.
pub(super) fn mebibytes(text: &str) -> Result<u64, String> {
    in_units(text, &[('m', 1), ('g', 1_024)])
        .ok_or_else(|| "give MiB, like 1024, or a whole number with a unit, like 1G".into())
}

/// `4096`, `64K`, `64M` or `1G`, in bytes.
fn bytes(text: &str) -> Result<u64, String> {
    in_units(text, &[('k', 1 << 10), ('m', 1 << 20), ('g', 1 << 30)])
        .ok_or_else(|| "give bytes, like 65536, or a whole number with a unit, like 64M".into())
}

/// Parses a whole number with one of these units, in either case and with or without `iB`, or with
/// none.
pub(crate) fn in_units(text: &str, units: &[(char, u64)]) -> Option<u64> {
    let lower = text.to_ascii_lowercase();
    let plain = lower.trim_end_matches("ib");
    let with_unit = |&(unit, size)| Some((plain.strip_suffix(unit)?, size));
    let (number, size) = units.iter().find_map(with_unit).unwrap_or((plain, 1));
    number.parse::<u64>().ok()?.checked_mul(size)
}

const EXIT_CODES: &str = "\
Exit status:
  0        the guest powered off, or ended with status 0
  1        the VM could not be started
  2        the command line can't be used, or a file or device that it names
  N        the guest ended with status N (a byte written to port 0xf4)
  120      the guest reset itself
  121      the guest crashed: a triple fault, or an exit that KVM can't handle
  122      the VMM process was killed
  123      the NAT failed, and the VM was stopped
  130, 143 stopped by Ctrl-C or the escape, by SIGTERM

With --kernel, a terminal is the guest's console: Ctrl-A x quits, Ctrl-A Ctrl-A sends Ctrl-A.";
