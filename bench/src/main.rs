//! Benchmarks of slipgate and its peers: the same workloads, interleaved, in private networks.
//!
//! ```text
//! main ─► run ─► contender × workload ─► results ─► goals, report, plot
//!              ├ microvm        the built-in guest under slipgate run and QEMU
//!              ├ dns            questions answered, beside dnsmasq and unbound
//!              ├ fleet          many VMs that come and go
//!              ├ clones         machines that go on from one snapshot
//!              ├ snapshots      a whole one, and differences on it
//!              ├ vsock          streams between host and guest, beside vhost-device-vsock
//!              ├ disk           random reads, and writes with flushes, beside QEMU's virtio-blk
//!              ├ disk_debian    the same by a stock Linux, and writes
//!              ├ scale          a thousand to a million live flows
//!              ├ relay          forwards of the host's own, beside a copy loop and rinetd
//!              ├ rootless       slipgate exec beside pasta and slirp4netns
//!              └ program_cost
//! ```
#![cfg(target_os = "linux")]

mod clones;
mod conditions;
mod contender;
mod cpu_time;
mod disk;
mod disk_debian;
mod dns;
mod dns_exchange;
mod family;
mod fleet;
mod generator;
mod goals;
mod guest_frames;
mod guest_machine;
mod injector;
mod machine;
mod microvm;
mod plot;
mod process_tree;
mod program_cost;
mod rates;
mod recorded;
mod relay;
mod report;
mod results;
mod rootless;
mod run;
mod scale;
mod snapshots;
mod statistics;
mod vsock;
mod workload;
mod workload_names;

use std::{env, fs, path::PathBuf, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use slipgate_testbed::{CONGESTION_CONTROL, affinity, requirements};

use crate::{
    clones::CLONE,
    conditions::Conditions,
    contender::Contender,
    disk::DISK,
    disk_debian::DISK_DEBIAN,
    family::{Families, Family, is_ipv6, without_family},
    fleet::{FLEET, PARTS},
    machine::Pinning,
    report::Report,
    results::{Cell, Table},
    rootless::PARTS as ROOTLESS,
    run::{Plan, Settings},
    scale::SCALE,
    snapshots::SNAPSHOT,
    vsock::VSOCK,
    workload::{Limits, Workload},
};

/// Names that `--only` accepts besides the workloads.
const PROGRAMS: &str = "programs";
const MICROVM: &str = "microvm";
/// Parts of `microvm` that can be measured separately.
const MICROVM_GUESTS: &str = "microvm-guests";
const MICROVM_RING: &str = "microvm-ring";
const DNS: &str = "dns";
const RELAY: &str = "relay";
/// Part of the benchmarks: rates of VMs.
const RATES: &str = "rates";

/// Measures slipgate, nftables, plain forwarding, pasta, slirp4netns and einat side by side; its
/// resolver beside dnsmasq and unbound.
#[derive(Parser, Debug)]
#[command(name = "cargo xtask bench --", max_term_width = 100)]
struct CommandLine {
    /// Only these workloads: bulk-up, bulk-down, connect-close, request-response, udp-64,
    /// established, new-flows-udp, new-flows-tcp, microvm (microvm-guests, microvm-ring), dns,
    /// relay, rootless (rootless-exec, rootless-forward, rootless-vm), rates, fleet (fleet-add,
    /// fleet-restart, fleet-flood, fleet-workers), clone, snapshot, vsock, disk, programs; by request
    /// only: scale, disk-debian
    #[arg(long, value_delimiter = ',', value_name = "WORKLOAD")]
    only: Vec<String>,
    /// Families of addresses in which the workloads are measured; other parts are of IPv4 unless
    /// they say so
    #[arg(long, value_enum, value_name = "FAMILY", default_value_t = Families::Both)]
    family: Families,
    /// Only these contenders; ratios are to nftables, those of whole microVMs to qemu-tap
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    contenders: Vec<String>,
    /// How often everything is measured
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    rounds: Option<u16>,
    /// Seconds of a bulk transfer; everything else takes half of it
    #[arg(long, value_name = "S")]
    seconds: Option<f64>,
    /// Two short rounds: whether it works, not how fast it is
    #[arg(long)]
    quick: bool,
    /// No further round is begun that would end later than this, seconds
    #[arg(long, value_name = "S", default_value_t = 450)]
    budget: u64,
    /// TCP's congestion control in guests, host and world
    #[arg(long, value_name = "NAME", default_value = CONGESTION_CONTROL, value_parser = available)]
    congestion_control: String,
    /// Let the scheduler place everything
    #[arg(long)]
    no_pinning: bool,
    /// Measure nothing: print the tables of an earlier run's JSON file, and draw its plot beside it
    #[arg(long, value_name = "FILE")]
    plot_from: Option<PathBuf>,
    /// Directory of the JSON file and the plot [default: target/bench]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

fn main() -> Result<()> {
    if let Some(ended) = microvm::ring::as_vmm() {
        return ended;
    }
    if let Some(ended) = relay::as_copy_loop() {
        return ended;
    }
    if let Some(ended) = contender::hop::as_hop() {
        return ended;
    }
    if let Some(ended) = rootless::splice_loop::as_splice_loop() {
        return ended;
    }
    let args = CommandLine::parse();
    if let Some(file) = &args.plot_from {
        print!("{}", recorded::show(file)?);
        return Ok(());
    }
    requirements::root_and_tun()
        .map_err(|why| anyhow::anyhow!("the benchmarks can't run: {why}"))?;
    let (rounds, seconds) = if args.quick { (2, 0.4) } else { (5, 2.0) };
    let seconds = args.seconds.unwrap_or(seconds);
    ensure!(
        (0.1..=60.0).contains(&seconds),
        "--seconds {seconds}: give 0.1 to 60"
    );
    let limits = Limits {
        bulk: Duration::from_secs_f64(seconds),
        short: Duration::from_secs_f64(seconds / 2.0),
    };
    let pinning = match args.no_pinning {
        true => Pinning::none(),
        false => Pinning::of_this_machine(),
    };
    let wanted = |part: &str| is_wanted(part, &args.only);
    let programs = wanted(PROGRAMS);
    let workloads = chosen_workloads(&args.only, args.family)?;
    let mut conditions = Conditions::now(pinning, limits, &args.congestion_control);
    let mut contenders = present(chosen_contenders(&args.contenders)?, &mut conditions);
    contenders.retain(|contender| {
        let mut workloads = workloads.iter();
        workloads.any(|workload| contender.takes_part(workload.name()))
    });
    let rounds = args.rounds.map_or(rounds, usize::from);
    // Before anything is pinned: a machine's threads are the scheduler's to place.
    let parts = microvm::Parts {
        guests: wanted(MICROVM) || wanted(MICROVM_GUESTS),
        ring: wanted(MICROVM) || wanted(MICROVM_RING),
    };
    let of_rootless = |part: &str| wanted(ROOTLESS[0]) || wanted(part);
    let without_root = microvm::ROOTLESS.map(str::to_owned);
    let (parts, machines) = match parts.guests || !of_rootless(rootless::VM) {
        true => (parts, &args.contenders[..]),
        false => (
            microvm::Parts {
                guests: true,
                ..parts
            },
            &without_root[..],
        ),
    };
    let microvm = match parts.guests || parts.ring {
        true => microvm::measure(parts, machines, rounds, args.quick, &mut conditions),
        false => Vec::new(),
    };
    let vsock = wanted(VSOCK).then(|| vsock::measure(rounds, args.quick, &mut conditions));
    let disk = wanted(DISK).then(|| disk::measure(rounds, args.quick, &mut conditions));
    // By request only: where KVM boots no Linux, a round takes a minute.
    let of_debian = args.only.iter().any(|part| part == DISK_DEBIAN);
    let of_debian = of_debian.then(|| disk_debian::measure(rounds, args.quick, &mut conditions));
    if let Some(cpu) = pinning.ends {
        // Threads and processes started from now on inherit it; those in the middle are moved.
        affinity::pin_thread(cpu)?;
    }
    let settings = Settings {
        rounds,
        limits,
        pinning,
        congestion_control: args.congestion_control,
        budget: Duration::from_secs(args.budget),
    };
    let dns = wanted(DNS).then(|| dns::measure(&settings, &mut conditions));
    let relay = wanted(RELAY).then(|| relay::measure(&settings, &mut conditions));
    let rootless =
        of_rootless(rootless::EXEC).then(|| rootless::measure(&settings, &mut conditions));
    let forwards = of_rootless(rootless::FORWARD);
    let forwards = forwards.then(|| rootless::measure_forwards(&settings, &mut conditions));
    let rates = wanted(RATES).then(|| rates::measure(&settings, args.family, &mut conditions));
    let of_fleet = |part: &str| wanted(FLEET) || wanted(part);
    let fleet = PARTS.into_iter().any(of_fleet);
    let fleet = fleet.then(|| fleet::measure(&settings, args.quick, of_fleet));
    // By request only: it takes three minutes, and memory for two million flows.
    let scale = args.only.iter().any(|part| part == SCALE);
    let scale = scale.then(|| scale::measure(&settings, args.quick, args.family));
    let clone = wanted(CLONE).then(|| clones::measure(&settings, args.quick));
    let snapshot = wanted(SNAPSHOT).then(|| snapshots::measure(&settings, args.quick));
    let plan = Plan {
        contenders,
        workloads,
        settings,
    };
    let parts = [
        dns, relay, rootless, forwards, rates, fleet, scale, clone, snapshot, vsock, disk,
        of_debian,
    ];
    let programs = programs.then_some(args.family);
    let report = measure(&plan, conditions, programs, microvm, parts)?;
    print!("{}", report.text());
    write(&report, args.out)
}

fn measure(
    plan: &Plan,
    conditions: Conditions,
    programs: Option<Families>,
    microvm: Vec<Cell>,
    parts: [Option<(Vec<Cell>, Vec<Table>)>; 12],
) -> Result<Report> {
    let mut cells = if plan.workloads.is_empty() {
        Vec::new()
    } else {
        plan.run()
    };
    let mut tables = plan.tables(contender::REFERENCE, &cells);
    tables.extend(microvm::tables(&microvm));
    cells.extend(microvm);
    for (of_part, tables_of_part) in parts.into_iter().flatten() {
        tables.extend(tables_of_part);
        cells.extend(of_part);
    }
    Ok(Report {
        conditions,
        goals: goals::judge(&tables),
        tables,
        programs: programs.map_or_else(Vec::new, |families| {
            let measured = program_cost::measure(families, plan.settings.rounds);
            measured.unwrap_or_else(|error| {
                eprintln!("programs: {error:#}");
                Vec::new()
            })
        }),
        cells,
    })
}

fn write(report: &Report, out: Option<PathBuf>) -> Result<()> {
    let usual = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../target/bench"));
    let directory = out.unwrap_or(usual);
    fs::create_dir_all(&directory).with_context(|| format!("make {}", directory.display()))?;
    let directory = directory.canonicalize().unwrap_or(directory);
    let stem = report.conditions.date.replace(' ', "T").replace(':', "");
    let json = directory.join(format!("{stem}.json"));
    let text = serde_json::to_string_pretty(report).context("write the report as JSON")?;
    fs::write(&json, text).with_context(|| format!("write {}", json.display()))?;
    println!("\nraw   {}", json.display());
    if !report.tables.is_empty() {
        let svg = directory.join(format!("{stem}.svg"));
        plot::draw(&report.conditions, &report.tables, &svg)
            .with_context(|| format!("draw {}", svg.display()))?;
        println!("plot  {}", svg.display());
    }
    Ok(())
}

/// Returns the arguments after `role` if this program was started in that role, not to measure.
fn role_arguments(role: &str) -> Option<impl Iterator<Item = String>> {
    let mut args = env::args().skip(1);
    (args.next()? == role).then_some(args)
}

/// Parses the name of a congestion control that this kernel has.
fn available(name: &str) -> std::result::Result<String, String> {
    let path = "/proc/sys/net/ipv4/tcp_available_congestion_control";
    let all = fs::read_to_string(path).map_err(|why| format!("read {path}: {why}"))?;
    match all.split_whitespace().any(|one| one == name) {
        true => Ok(name.to_owned()),
        false => Err(format!("this kernel has loaded {}", all.trim())),
    }
}

/// Whether a list from the command line contains the name; an empty list contains all.
fn is_wanted(name: &str, only: &[String]) -> bool {
    only.is_empty() || only.iter().any(|only| only == name)
}

fn chosen_workloads(only: &[String], families: Families) -> Result<Vec<Box<dyn Workload>>> {
    let all = workload::all();
    let known: Vec<_> = all.iter().map(|workload| workload.name()).collect();
    let known: Vec<_> = known.into_iter().filter(|name| !is_ipv6(name)).collect();
    for name in only {
        let name = name.as_str();
        let ours = [
            PROGRAMS,
            MICROVM,
            MICROVM_GUESTS,
            MICROVM_RING,
            DNS,
            RELAY,
            RATES,
            FLEET,
            SCALE,
            CLONE,
            SNAPSHOT,
            VSOCK,
            DISK,
            DISK_DEBIAN,
        ];
        let parts = [&PARTS[..], &ROOTLESS].concat();
        if !ours.contains(&name) && !parts.contains(&name) && !known.contains(&name) {
            bail!(
                "--only {name}: give some of {}, {MICROVM}, {MICROVM_GUESTS}, {MICROVM_RING}, {DNS}, {RELAY}, {RATES}, {FLEET}, {SCALE}, {SNAPSHOT}, {VSOCK}, {DISK}, {DISK_DEBIAN}, {}, {PROGRAMS}",
                known.join(", "),
                parts.join(", ")
            );
        }
    }
    Ok(all
        .into_iter()
        .filter(|workload| {
            let name = workload.name();
            let family = if is_ipv6(name) {
                Family::Ipv6
            } else {
                Family::Ipv4
            };
            families.includes(family) && is_wanted(without_family(name), only)
        })
        .collect())
}

fn chosen_contenders(only: &[String]) -> Result<Vec<Box<dyn Contender>>> {
    let all = contender::all();
    let mut known: Vec<_> = all.iter().map(|contender| contender.name()).collect();
    known.extend(contender::USER_MODE_CURRENT.map(|process| process.name()));
    known.extend(microvm::contenders());
    for name in only {
        if !known.contains(&name.as_str()) {
            bail!("--contenders {name:?}: give some of {}", known.join(", "));
        }
    }
    Ok(all
        .into_iter()
        .filter(|contender| is_wanted(contender.name(), only))
        .collect())
}

/// Returns the contenders that can run on this machine. Records the versions and the missing
/// contenders.
fn present(
    mut contenders: Vec<Box<dyn Contender>>,
    conditions: &mut Conditions,
) -> Vec<Box<dyn Contender>> {
    contenders.retain(|contender| {
        let version = contender.version();
        let version = version.map(|version| format!("{version}, MTU {}", contender.mtu()));
        conditions.note(contender.name(), version)
    });
    contenders
}
