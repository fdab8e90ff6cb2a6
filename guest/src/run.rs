//! From the command line to the exit status: every CPU runs [`run`].
//!
//! # Theory of operation
//! The CPUs go through the workloads in lockstep. CPU 0 looks names up, publishes a
//! [`Plan`](crate::workload::Plan), and all CPUs meet. Each does its share, and all meet again; CPU
//! 0 prints the result. A CPU that waits at a meeting drives its stack: it passes on frames of
//! other CPUs, and answers ARP and echo requests. `ipv6`, `dns`, `ping`, `serve` and `wait` run on CPU 0
//! alone.
//!
//! Output is printed as JSON objects, one a line:
//! ```text
//! {"boot":true,"cpus":2,"pairs":2,"mac":"02:…","uptime_us":…}
//! {"workload":"lease","address":"10.0.2.15/24","router":"10.0.2.2","dns":["10.0.2.3"],"mtu":1500,…}
//! {"workload":"crr","server":"…","n":1000,"done":1000,"failed":0,"p50_us":…,"interrupts":…,…}
//! {"pair":0,"rx_frames":…,"tx_frames":…,"interrupts":…,"kicks":…,"passed_in":…}
//! {"end":true,"status":0}
//! ```

use alloc::{format, sync::Arc, vec::Vec};
use core::{
    net::{IpAddr, SocketAddr},
    sync::atomic::{AtomicUsize, Ordering},
};

use spin::mutex::SpinMutex;

use crate::{
    command::{
        BalloonWork, CommandError, CommandLine, DiskWork, Host, Server, VsockWork, Workload, parse,
    },
    json::Object,
    net::{Lanes, Lease, Stack, Turn, ipv6, lease},
    platform::{Nic, NicCounters, Platform},
    report,
    workload::{DnsError, Plan, fill, ping, resolve, serve},
};

/// Exit status: all workloads passed.
pub const STATUS_PASSED: u8 = 0;
/// Exit status: a workload failed, or a part of one.
pub const STATUS_FAILED: u8 = 1;
/// Exit status: the command line is wrong.
pub const STATUS_COMMAND_LINE: u8 = 2;
/// Exit status: no DHCP server gave a lease.
pub const STATUS_NO_LEASE: u8 = 3;

/// Longest wait for a lease, ns.
const LEASE_NS: u64 = 15_000_000_000;
/// Longest wait for an IPv6 address, ns.
const IPV6_NS: u64 = 4_000_000_000;

/// Reason why a workload has no destination.
#[derive(Debug, thiserror::Error)]
enum NoDestination {
    #[error("look the host up: {0}")]
    Name(#[from] DnsError),
    #[error(
        "no IPv6 address within {} s; does a router on the network advertise a prefix?",
        IPV6_NS / 1_000_000_000
    )]
    NoIpv6,
}

/// State that the CPUs share.
pub struct Shared {
    command_line: Result<CommandLine, CommandError>,
    lanes: Lanes,
    /// Number of arrivals at meetings, over all CPUs and meetings.
    met: AtomicUsize,
    /// CPU 0's message for the next meeting.
    word: SpinMutex<Option<Word>>,
    /// Counters of each pair at the end.
    counters: SpinMutex<Vec<Option<NicCounters>>>,
}

/// Message of CPU 0 to the others.
#[derive(Clone)]
enum Word {
    Configure(Lease),
    Work(Arc<Plan>),
    End,
}

impl Shared {
    /// Parses the command line for `cpus` CPUs. An error in it is printed by [`run`], which returns
    /// the status for it.
    pub fn parse(command_line: &str, cpus: usize) -> Self {
        Shared {
            command_line: parse(command_line),
            lanes: Lanes::new(cpus),
            met: AtomicUsize::new(0),
            word: SpinMutex::new(None),
            counters: SpinMutex::new(alloc::vec![None; cpus]),
        }
    }

    /// Returns the `disk` workloads: number of the disk, what is done, and bytes.
    pub fn disk_work(&self) -> impl Iterator<Item = (u32, DiskWork, u64)> {
        let workloads = self.command_line.iter().flat_map(|line| &line.workloads);
        workloads.filter_map(|workload| match *workload {
            Workload::Disk {
                number,
                work,
                bytes,
            } => Some((number, work, bytes)),
            _ => None,
        })
    }

    /// Returns the `vsock` workloads.
    pub fn vsock_work(&self) -> impl Iterator<Item = VsockWork> {
        let workloads = self.command_line.iter().flat_map(|line| &line.workloads);
        workloads.filter_map(|workload| match *workload {
            Workload::Vsock(work) => Some(work),
            _ => None,
        })
    }

    /// Returns the `balloon` workloads.
    pub fn balloon_work(&self) -> impl Iterator<Item = BalloonWork> {
        let workloads = self.command_line.iter().flat_map(|line| &line.workloads);
        workloads.filter_map(|workload| match *workload {
            Workload::Balloon(work) => Some(work),
            _ => None,
        })
    }

    /// Returns whether the command line asks for the self-test, which runs before all workloads.
    pub fn selftest(&self) -> bool {
        let asks = |line: &CommandLine| line.workloads.contains(&Workload::SelfTest);
        self.command_line.as_ref().is_ok_and(asks)
    }
}

/// Runs the workloads on this CPU, together with all others. CPU 0's result is the exit status.
pub fn run<P: Platform, N: Nic>(cpu: usize, platform: &P, nic: N, shared: &Shared) -> u8 {
    let (_, pairs) = nic.pair();
    let mac = nic.mac();
    let mut cpu = Cpu {
        stack: Stack::new(platform, nic, cpu, &shared.lanes),
        shared,
        meetings: 0,
        has_no_ipv6: false,
    };
    if cpu.stack.cpu != 0 {
        cpu.follow();
        return STATUS_PASSED;
    }
    let boot = report::boot(shared.lanes.cpus(), pairs, mac, platform.now_ns());
    platform.print_line(&boot.into_line());
    let status = cpu.lead();
    cpu.tell(Word::End);
    cpu.count();
    cpu.meet();
    let counters = shared.counters.lock().clone();
    for (pair, counters) in counters.into_iter().enumerate() {
        let line = report::pair(
            pair,
            counters.unwrap_or_default(),
            shared.lanes.counters(pair),
        );
        platform.print_line(&line.into_line());
    }
    let end = Object::default().truth("end", true);
    platform.print_line(&end.number("status", status.into()).into_line());
    status
}

/// One CPU's state during the workloads.
struct Cpu<'s, P, N: Nic> {
    stack: Stack<'s, P, N>,
    shared: &'s Shared,
    meetings: usize,
    /// Whether no router has advertised a prefix for as long as is waited for it.
    has_no_ipv6: bool,
}

impl<P: Platform, N: Nic> Cpu<'_, P, N> {
    /// Waits until all CPUs have arrived.
    fn meet(&mut self) {
        let cpus = self.shared.lanes.cpus();
        self.meetings += 1;
        let due = self.meetings * cpus;
        let met = &self.shared.met;
        if met.fetch_add(1, Ordering::SeqCst) + 1 == due {
            for other in (0..cpus).filter(|other| *other != self.stack.cpu) {
                self.shared.lanes.nudge(other, self.stack.platform);
            }
            return;
        }
        let all_came = || met.load(Ordering::SeqCst) >= due;
        self.stack.drive_until(
            |_| match all_came() {
                true => Turn::Done(()),
                false => Turn::Waiting(None),
            },
            all_came,
        );
    }

    /// CPU 0: publishes a message. All CPUs can read it when this returns.
    fn tell(&mut self, word: Word) {
        *self.shared.word.lock() = Some(word);
        self.meet();
    }

    /// Other CPUs: carries out CPU 0's messages until the end.
    fn follow(&mut self) {
        loop {
            self.meet();
            let word = self.shared.word.lock().clone();
            match word {
                Some(Word::Configure(lease)) => self.stack.configure(&lease),
                Some(Word::Work(plan)) => plan.work(&mut self.stack),
                Some(Word::End) | None => break,
            }
            self.meet();
        }
        self.count();
        self.meet();
    }

    fn count(&mut self) {
        let counters = self.stack.device.nic.counters();
        if let Some(slot) = self.shared.counters.lock().get_mut(self.stack.cpu) {
            *slot = Some(counters);
        }
    }

    /// CPU 0: configures the network and runs all workloads. Returns the exit status.
    fn lead(&mut self) -> u8 {
        let command_line = match &self.shared.command_line {
            Ok(command_line) => command_line,
            Err(error) => {
                let line = Object::about("error", &error.why).text("command", &error.command);
                self.print(line);
                return STATUS_COMMAND_LINE;
            }
        };
        let started_ns = self.stack.now_ns();
        if command_line.workloads.iter().any(Workload::is_by_ipv6) {
            // The answer comes while the lease is taken.
            ipv6::solicit_router(&mut self.stack);
        }
        let lease = match command_line.address {
            Some(given) => {
                let lease = Lease::from(given);
                self.stack.configure(&lease);
                Some(lease)
            }
            None => lease::acquire(&mut self.stack, started_ns + LEASE_NS),
        };
        let Some(mut lease) = lease else {
            let seconds = LEASE_NS / 1_000_000_000;
            let why = format!("no DHCP lease within {seconds} s; is a DHCP server on the network?");
            self.print(Object::about("error", &why));
            return STATUS_NO_LEASE;
        };
        let took_ns = self.stack.now_ns() - started_ns;
        let mtu = self.stack.mtu();
        self.print(report::lease(&lease, mtu, took_ns));
        self.configure_all(&lease);
        let mut status = STATUS_PASSED;
        for workload in &command_line.workloads {
            if !self.one(workload, &mut lease) {
                status = STATUS_FAILED;
            }
        }
        status
    }

    /// CPU 0: has the other CPUs apply a lease.
    fn configure_all(&mut self, lease: &Lease) {
        self.tell(Word::Configure(lease.clone()));
        self.meet();
        self.stack.ask_neighbors(lease);
    }

    /// CPU 0: waits for an IPv6 address, unless it has been done, and has all CPUs apply it.
    fn get_ipv6(&mut self, lease: &mut Lease) -> Result<(), NoDestination> {
        if lease.ipv6.is_some() {
            return Ok(());
        }
        let started_ns = self.stack.now_ns();
        let patience_ns = if self.has_no_ipv6 { 0 } else { IPV6_NS };
        lease.ipv6 = ipv6::acquire(&mut self.stack, started_ns + patience_ns);
        let Some(ipv6) = lease.ipv6 else {
            self.has_no_ipv6 = true;
            return Err(NoDestination::NoIpv6);
        };
        self.stack.configure(lease);
        let took_ns = self.stack.now_ns() - started_ns;
        let mtu = self.stack.mtu();
        self.print(report::ipv6(&ipv6, mtu, took_ns));
        self.configure_all(lease);
        Ok(())
    }

    /// Runs one workload. Returns whether it passed.
    fn one(&mut self, workload: &Workload, lease: &mut Lease) -> bool {
        if workload.is_by_ipv6()
            && let Err(error) = self.get_ipv6(lease)
        {
            return self.no_destination(workload, &error);
        }
        match workload {
            // Done by now.
            Workload::Ipv6 => true,
            // Done before the network was up.
            Workload::SelfTest
            | Workload::Disk { .. }
            | Workload::Vsock(_)
            | Workload::Balloon(_) => true,
            Workload::Reset => {
                self.stack.platform.reset();
                // The machine has no reset.
                false
            }
            Workload::Wait { ms } => {
                let until_ns = self.stack.now_ns() + u64::from(*ms) * 1_000_000;
                self.stack.drive(|stack| match stack.now_ns() {
                    now_ns if now_ns >= until_ns => Turn::Done(()),
                    _ => Turn::Waiting(Some(until_ns)),
                });
                self.print(Object::about("workload", "wait").number("ms", (*ms).into()));
                true
            }
            Workload::Fill { mib } => {
                let filled = fill(*mib, self.stack.now_ns());
                let line = Object::about("workload", "fill").number("mib", (*mib).into());
                self.print(match filled {
                    true => line,
                    false => line.text("error", "there is not so much memory"),
                });
                filled
            }
            Workload::Serve { ports, ms } => {
                self.print(report::serving(ports, *ms));
                let served = serve(&mut self.stack, ports, u64::from(*ms) * 1_000_000);
                self.print(report::served(ports, *ms, &served));
                true
            }
            Workload::Dns {
                name,
                family,
                resolver,
            } => {
                let resolver = resolver.or_else(|| first_resolver(lease));
                let answer = resolve(&mut self.stack, resolver, name, *family);
                let well = answer.is_ok();
                self.print(report::dns(workload, name, &answer));
                well
            }
            Workload::Ping { host, count } => match self.address(host, lease) {
                Ok(address) => {
                    let pinged = ping(&mut self.stack, address, *count);
                    self.print(report::ping(address, *count, &pinged));
                    pinged.lost == 0
                }
                Err(error) => self.no_destination(workload, &error),
            },
            Workload::Connections { server, .. }
            | Workload::RequestResponse { server, .. }
            | Workload::Stream { server, .. }
            | Workload::Flood { server, .. } => match self.server(server, lease) {
                Ok(server) => self.together(workload, server),
                Err(error) => self.no_destination(workload, &error),
            },
        }
    }

    /// Runs a workload that all CPUs share. Returns whether it passed.
    fn together(&mut self, workload: &Workload, server: SocketAddr) -> bool {
        let (cpus, now_ns) = (self.shared.lanes.cpus(), self.stack.now_ns());
        let plan = Arc::new(Plan::new(workload.clone(), server, cpus, now_ns));
        self.tell(Word::Work(plan.clone()));
        plan.work(&mut self.stack);
        self.meet();
        let outcome = plan.outcome();
        self.print(report::shared_out(&plan, &outcome));
        outcome.failed() == 0
    }

    fn server(&mut self, server: &Server, lease: &Lease) -> Result<SocketAddr, NoDestination> {
        let address = self.address(&server.host, lease)?;
        Ok(SocketAddr::new(address, server.port))
    }

    fn address(&mut self, host: &Host, lease: &Lease) -> Result<IpAddr, NoDestination> {
        match host {
            Host::Address(address) => Ok(*address),
            Host::Name(name, family) => {
                let answer = resolve(&mut self.stack, first_resolver(lease), name, *family)?;
                let first = answer.addresses.first();
                Ok(*first.ok_or(DnsError::NoRecord(*family))?)
            }
        }
    }

    fn no_destination(&mut self, workload: &Workload, error: &NoDestination) -> bool {
        let line = Object::about("workload", workload.name());
        self.print(line.shown("error", error));
        false
    }

    fn print(&self, object: Object) {
        self.stack.platform.print_line(&object.into_line());
    }
}

fn first_resolver(lease: &Lease) -> Option<IpAddr> {
    lease.dns.first().copied().map(IpAddr::from)
}
