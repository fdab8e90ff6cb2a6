//! Configuration of `slipgate run`: the machine, and the NAT of its one VM.
use std::{ops::RangeInclusive, path::Path};

use slipgate_broker::config::{
    CgroupSpec, Config, DiskSpec, MAX_DISKS, MachineSpec, OWN_SNAPSHOT, RunConfig, SavedMachine,
    VmConfig, VmmBounds, VsockSpec, check_tap, parse_mac,
};
use slipgate_ipc::{
    engine::OnExit,
    vmm::{CpuTemplate, NetRates},
};
use slipgate_policy::document::{ConfigError, RuleFlag, check_name};

use super::{
    checked,
    disk::disks,
    network, rate,
    userspace::{self, LEAVE_OUT, NOT_YET},
};
use crate::args::{self, Jail, OnReboot, RunArgs};

/// Virtual CPUs at most.
const MAX_CPUS: u32 = 32;
/// Addresses that a guest's vsock may have. A binary without the VMM checks `--vsock` too, and then
/// says that it has none.
const GUEST_CIDS: RangeInclusive<u32> = 3..=u32::MAX - 1;
#[cfg(target_arch = "x86_64")]
const _: () = {
    let devices = slipgate_vmm::virtio::vsock::GUEST_CIDS;
    assert!(*GUEST_CIDS.start() == *devices.start() && *GUEST_CIDS.end() == *devices.end());
};
/// Queue pairs at most.
const MAX_QUEUES: u32 = 16;
/// Permitted memory, MiB: from the need of the built-in guest to what fits 40 bits of
/// guest-physical address beside the holes.
const MEMORY_MIB: std::ops::RangeInclusive<u64> = 32..=524_288;
/// Size of a huge page, MiB.
const HUGE_PAGE_MIB: u64 = 2;
/// Permitted limits of a cgroup: percent of a CPU, and memory from what a VMM needs without its guest's.
const CPU_PERCENT: RangeInclusive<u32> = 1..=102_400;
const MEMORY_BYTES: RangeInclusive<u64> = 16 << 20..=1 << 50;
const SWAP_BYTES: RangeInclusive<u64> = 0..=1 << 50;
const PIDS: RangeInclusive<u32> = 1..=4_194_304;
/// Permitted bounds of a console's file.
const CONSOLE_BYTES: std::ops::RangeInclusive<u64> = 4_096..=1 << 40;
/// Longest command line, bytes: x86 Linux's `COMMAND_LINE_SIZE` less the final zero.
const MAX_CMDLINE: usize = 2_047;
/// Default work of the built-in guest.
const BUILT_IN_WORK: &str = "selftest";
/// Default kernel command line: messages are shown, and a panic ends the VM.
const KERNEL_CMDLINE: &str = "console=ttyS0 panic=-1";
/// For the kernel to put a number in the place of `%d`.
const TAP_PATTERN: &str = "sgvm%d";
/// Remedy for a snapshot of a machine that cannot exist.
const REMAKE: &str = "give a snapshot as `slipgate snapshot` wrote it";
/// The guest's MAC, locally administered; all VMs may have the same.
const GUEST_MAC: [u8; 6] = [0x02, 0x53, 0x4c, 0x47, 0x00, 0x02];

/// Checks the flags of `run`. `is_userspace`: it runs in user mode. `order`: the rule flags as typed,
/// see [`super::rule_flags`].
pub(crate) fn run(
    args: &RunArgs,
    is_userspace: bool,
    order: Vec<RuleFlag>,
) -> Result<RunConfig, ConfigError> {
    if let (Some(name), true) = (&args.as_vm, is_userspace) {
        let problem = "no daemon serves a VM in user mode";
        let remedy = "leave --mode userspace out, beside `slipgate serve`";
        return Err(ConfigError::new("--as", name, problem, remedy));
    }
    let tap = match &args.tap {
        Some(tap) if is_userspace => {
            let problem = "in user mode the VM has no TAP";
            return Err(ConfigError::new("--tap", tap, problem, LEAVE_OUT));
        }
        None if is_userspace => String::new(),
        Some(tap) => {
            check_tap("--tap", tap, tap)?;
            if tap.contains('%') {
                let problem = "the kernel would put a number in the place of %";
                let remedy = "give a name, or leave --tap out";
                return Err(ConfigError::new("--tap", tap, problem, remedy));
            }
            // The VM may be called as it.
            check_name("--tap", tap, tap)?;
            tap.clone()
        }
        None => TAP_PATTERN.into(),
    };
    let name = match args.name.as_ref().or(args.as_vm.as_ref()) {
        Some(name) => check_name("--name", name, name)?.to_owned(),
        None if is_userspace => format!("run-{}", std::process::id()),
        None => tap.clone(),
    };
    if let (Some(initrd), None) = (&args.initrd, &args.kernel) {
        let problem = "the built-in guest has no use for it";
        let remedy = "give its --kernel too, or leave it out";
        let initrd = initrd.display();
        return Err(ConfigError::new("--initrd", initrd, problem, remedy));
    }
    let mac = match &args.mac {
        Some(text) => Some(parse_mac("--mac", text, text)?),
        None => None,
    };
    let named_by_tap = args.name.is_none() && args.as_vm.is_none();
    let machine = match &args.restore {
        Some(dir) => MachineSpec {
            tap: tap.clone(),
            named_by_tap,
            ..restored(args, dir, is_userspace)?
        },
        None => MachineSpec {
            tap: tap.clone(),
            named_by_tap,
            ..booted(args, mac, is_userspace)?
        },
    };
    let nat = if is_userspace {
        userspace::of_one(&args.nat, &args.api, &name, mac, order)?
    } else {
        let network = network::parse(&args.nat)?;
        let vm = VmConfig {
            mac,
            ..VmConfig::new(&name, &tap, network.guest)
        };
        // The VM ends with us: no flow has anybody to go on for.
        checked(&args.nat, network, Some(vec![vm]), OnExit::Detach, order)?
    };
    Ok(RunConfig {
        machine,
        nat: Config {
            new_vms: true,
            ..nat
        },
        report: args.report.clone(),
        is_kept: args.as_vm.is_some(),
        bounds: VmmBounds {
            requires_jail: args.jail == Jail::Required,
            cgroup: cgroup(args)?,
            may_restart: args.on_reboot == OnReboot::Restart,
            huge_pages: huge_pages(args)?,
            console_bytes: in_range("--console-limit", args.console_limit, CONSOLE_BYTES)?,
        },
    })
}

/// The cgroup of the VMM.
fn cgroup(args: &RunArgs) -> Result<Option<CgroupSpec>, ConfigError> {
    let Some(parent) = &args.cgroup else {
        return Ok(None);
    };
    let percent = args
        .cpu_max
        .map(|it| in_range("--cpu-max", it, CPU_PERCENT));
    let memory = args
        .memory_max
        .map(|it| in_range("--memory-max", it, MEMORY_BYTES));
    let swap = args
        .swap_max
        .map(|it| in_range("--swap-max", it, SWAP_BYTES));
    let pids = args.pids_max.map(|it| in_range("--pids-max", it, PIDS));
    Ok(Some(CgroupSpec {
        parent: parent.clone(),
        cpu_percent: percent.transpose()?,
        memory_bytes: memory.transpose()?,
        swap_bytes: swap.transpose()?,
        pids: pids.transpose()?,
    }))
}

/// The machine of a snapshot, with the disks and the socket of the flags in the place of its own.
fn restored(args: &RunArgs, dir: &Path, is_userspace: bool) -> Result<MachineSpec, ConfigError> {
    let refused = |problem: String, remedy: &str| {
        ConfigError::new("--restore", dir.display(), problem, remedy.to_owned())
    };
    // It names the disks that are opened.
    SavedMachine::check_writers(dir).map_err(|why| refused(why, OWN_SNAPSHOT))?;
    let saved = SavedMachine::read(dir).map_err(|e| {
        let remedy = "give a directory that `slipgate snapshot` wrote to its end";
        refused(format!("its machine.json can't be read ({e})"), remedy)
    })?;
    if args.on_reboot == OnReboot::Restart {
        let problem = "a snapshot has no kernel to begin anew with";
        let remedy =
            "leave it out: a reset of the guest ends the run, and --restore begins another";
        return Err(ConfigError::new("--on-reboot", "restart", problem, remedy));
    }
    let mut machine = saved.machine;
    in_range("--restore", u32::from(machine.cpus), 1..=MAX_CPUS)?;
    in_range("--restore", machine.memory_mib, MEMORY_MIB)?;
    in_range("--restore", u32::from(machine.queues), 1..=MAX_QUEUES)?;
    if is_userspace && machine.queues > 1 {
        let problem = format!(
            "its network card has {} queue pairs, and in user mode there is one",
            machine.queues
        );
        return Err(refused(problem, "restore it with a TAP, as root"));
    }
    if machine.disks.len() > MAX_DISKS {
        let count = machine.disks.len();
        let problem = format!("its machine has {count} disks, and one has {MAX_DISKS} at most");
        return Err(refused(problem, REMAKE));
    }
    if let Some(vsock) = &machine.vsock
        && !GUEST_CIDS.contains(&vsock.cid)
    {
        let (first, last) = (GUEST_CIDS.start(), GUEST_CIDS.end());
        let problem = format!(
            "its vsock address {} is not a guest's, which is from {first} to {last}",
            vsock.cid
        );
        return Err(refused(problem, REMAKE));
    }
    if machine.balloon_mib > Some(machine.memory_mib) {
        let problem = format!(
            "its balloon is larger than its memory of {} MiB",
            machine.memory_mib
        );
        return Err(refused(problem, REMAKE));
    }
    let disks = disks(&args.disk)?;
    if !disks.is_empty() {
        let kind = |disk: &DiskSpec| (disk.read_only, disk.cache);
        let kinds = |disks: &[DiskSpec]| disks.iter().map(kind).collect::<Vec<_>>();
        if kinds(&disks) != kinds(&machine.disks) {
            let (given, there) = (disks.len(), machine.disks.len());
            let problem = format!("{given} disks were given in the place of {there}");
            let remedy =
                "give a --disk for each of the snapshot's, with ,ro and ,cache= where it has those";
            return Err(refused(problem, remedy));
        }
        machine.disks = disks;
    }
    if let Some(text) = &args.vsock {
        if machine.vsock.is_none() {
            let problem = "its machine has no vsock device".to_owned();
            return Err(refused(problem, "leave --vsock out"));
        }
        machine.vsock = Some(vsock(text)?);
    }
    machine.net_rates = rate::of_card(args, machine.net_rates)?;
    machine.restore = Some(dir.to_owned());
    Ok(machine)
}

/// The machine that the flags describe; but for its TAP.
fn booted(
    args: &RunArgs,
    mac: Option<[u8; 6]>,
    is_userspace: bool,
) -> Result<MachineSpec, ConfigError> {
    let cpus = in_range("--cpus", args.cpus, 1..=MAX_CPUS)? as u8;
    let queues = queues(args, is_userspace)?;
    Ok(MachineSpec {
        restore: None,
        kernel: args.kernel.clone(),
        initrd: args.initrd.clone(),
        disks: disks(&args.disk)?,
        vsock: args.vsock.as_deref().map(vsock).transpose()?,
        balloon_mib: balloon(args)?,
        cmdline: cmdline(args)?,
        cpus,
        memory_mib: in_range("--memory", args.memory, MEMORY_MIB)?,
        cpu_template: match args.cpu_template {
            args::CpuTemplate::Host => CpuTemplate::Host,
            args::CpuTemplate::X86_64V1 => CpuTemplate::X86_64V1,
            args::CpuTemplate::X86_64V2 => CpuTemplate::X86_64V2,
            args::CpuTemplate::X86_64V3 => CpuTemplate::X86_64V3,
        },
        queues,
        net_rates: rate::of_card(args, NetRates::default())?,
        mac: mac.unwrap_or(GUEST_MAC),
        mtu: None,
        named_by_tap: false,
        tap: String::new(),
    })
}

/// Whether the memory is of huge pages.
fn huge_pages(args: &RunArgs) -> Result<bool, ConfigError> {
    if args.huge_pages && !args.memory.is_multiple_of(HUGE_PAGE_MIB) {
        let problem = "huge pages have 2 MiB, and it is no multiple of that";
        let remedy = "give an even number of MiB";
        return Err(ConfigError::new("--memory", args.memory, problem, remedy));
    }
    Ok(args.huge_pages)
}

/// The balloon, which can't be larger than the memory.
fn balloon(args: &RunArgs) -> Result<Option<u64>, ConfigError> {
    match args.balloon {
        Some(mib) if mib > args.memory => {
            let problem = format!("the guest has {} MiB of memory", args.memory);
            let remedy = "give less, or more --memory";
            Err(ConfigError::new("--balloon", mib, problem, remedy))
        }
        given => Ok(given),
    }
}

/// The vsock device, from `CID,SOCKET`.
fn vsock(text: &str) -> Result<VsockSpec, ConfigError> {
    let refused = |problem: String| {
        let remedy = "give an address and a path, like 3,/run/vm.sock";
        ConfigError::new("--vsock", text, problem, remedy)
    };
    let Some((cid, socket)) = text.split_once(',').filter(|(_, path)| !path.is_empty()) else {
        return Err(refused("there is no path of a socket in it".to_owned()));
    };
    let (first, last) = (GUEST_CIDS.start(), GUEST_CIDS.end());
    match cid.parse() {
        Ok(cid) if GUEST_CIDS.contains(&cid) => Ok(VsockSpec {
            cid,
            socket: socket.into(),
        }),
        _ => Err(refused(format!(
            "{cid} is not a guest's address, which is from {first} to {last}"
        ))),
    }
}

/// Queue pairs of the network card.
fn queues(args: &RunArgs, is_userspace: bool) -> Result<u16, ConfigError> {
    let most = if is_userspace { 1 } else { MAX_QUEUES };
    let queues = args.queues.unwrap_or(args.cpus.min(most));
    if is_userspace && queues > most {
        let remedy = "leave it out: the card has one queue pair";
        return Err(ConfigError::new("--queues", queues, NOT_YET, remedy));
    }
    Ok(in_range("--queues", queues, 1..=MAX_QUEUES)? as u16)
}

fn cmdline(args: &RunArgs) -> Result<String, ConfigError> {
    let text = match (&args.cmdline, &args.kernel) {
        (Some(text), _) => text,
        (None, Some(_)) => KERNEL_CMDLINE,
        (None, None) => BUILT_IN_WORK,
    };
    let err = |problem: String, remedy| Err(ConfigError::new("--cmdline", text, problem, remedy));
    if text.len() > MAX_CMDLINE {
        let problem = format!("it has {} bytes", text.len());
        let remedy = format!("give {MAX_CMDLINE} at most");
        return Err(ConfigError::new("--cmdline", "(long)", problem, remedy));
    }
    match text.chars().find(|c| c.is_control() || !c.is_ascii()) {
        Some(c) => err(format!("{c:?} is not printable ASCII"), "leave it out"),
        None if text.trim().is_empty() && args.kernel.is_none() => err(
            "the built-in guest would have nothing to do".into(),
            "give it work, like selftest or \"dns example.com\"",
        ),
        None => Ok(text.to_owned()),
    }
}

fn in_range<N: Copy + PartialOrd + std::fmt::Display>(
    flag: &'static str,
    given: N,
    range: std::ops::RangeInclusive<N>,
) -> Result<N, ConfigError> {
    if range.contains(&given) {
        return Ok(given);
    }
    let (least, most) = (range.start(), range.end());
    let (problem, near) = if given < *least {
        (format!("it must be at least {least}"), least)
    } else {
        (format!("{most} is the most"), most)
    };
    Err(ConfigError::new(
        flag,
        given,
        problem,
        format!("give {near}"),
    ))
}

#[cfg(test)]
#[path = "machine_test.rs"]
mod tests;
