//! An engine with its real services, a kernel, three VMs with one address, and the expected state.
use std::{
    io::{self, Write},
    net::Ipv4Addr,
    os::fd::BorrowedFd,
    sync::{Arc, Mutex},
};

use hashbrown::HashSet;
use ipnet::Ipv4Net;
use slipgate_abi::{DropReason, IfIndex, PortHeader, VmId, portframe::PortFlags};
use slipgate_model::{
    HostAddress, Link, NetworkView, RouteEntry, RouteKind, RouteSnapshot, SleepChange, VmSpec,
};
use slipgate_policy::{Action, LocalAddresses, Policy, Rule};
use userspace_nat::{
    control::{ActivityChanges, Control, EndsToken, Reloaded, Status},
    dns,
    event_loop::{Engine, Parts},
    fake::{FakeClock, FakeDatapath, FakePort, Faults, Kernel, KernelHandle},
    name_gate::{Judge, SharedJudge},
    port::{PORT_HEADER_AT, VNET_LEN},
    record::{FlowLog, recorded_ids},
    relay::{Limits, Relay},
    services::Services,
};

use super::inspected::{self, Server};
use crate::vms::{GATEWAY, GUEST, HOST, ip, spec};

/// Number of VMs, in rows 1 to this one.
pub(super) const VMS: u16 = 3;
/// Number of rows that a frame may name: row 0, the VMs', and an empty one.
pub(super) const ROWS: u16 = VMS + 2;
/// Ifindex of the uplink.
pub(super) const UPLINK: IfIndex = IfIndex::new(3);
const SLOTS: u32 = 1_024;
const MAX_FLOWS: u32 = 12;
const SECOND_NS: u64 = 1_000_000_000;

pub(super) type FuzzEngine = Engine<FakeDatapath, FakePort, FakeClock>;
/// Effect of a message of the broker on the engine.
type Command = Box<dyn FnOnce(&mut FuzzEngine)>;

/// The broker's end of the channel.
#[derive(Default)]
struct Broker {
    messages: Vec<Command>,
}

impl Control<FuzzEngine> for Broker {
    fn serve(&mut self, engine: &mut FuzzEngine) -> io::Result<()> {
        for command in self.messages.drain(..) {
            command(engine);
        }
        Ok(())
    }
    fn ended(&mut self, _: EndsToken) -> io::Result<()> {
        Ok(())
    }
    fn reloaded(&mut self, _: Reloaded) -> io::Result<()> {
        Ok(())
    }
    fn activity(&mut self, _: ActivityChanges) -> io::Result<()> {
        Ok(())
    }
    fn sleep_changes(&mut self, _: Vec<(VmId, SleepChange)>) -> io::Result<()> {
        Ok(())
    }
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// A flow log in memory.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut log = self.0.lock().map_err(|_| io::Error::other("poisoned"))?;
        log.extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

pub(super) struct Rig {
    pub(super) kernel: KernelHandle,
    engine: Option<FuzzEngine>,
    broker: Broker,
    log: Log,
    judge: SharedJudge,
    pub(super) server: Server,
    setup: u8,
    epoch: u32,
    /// Id of the VM in each row; 0: none.
    pub(super) ids: [u32; VMS as usize + 1],
    next_id: u32,
    /// Counters of the frames that earlier engines handled.
    past: Status,
    /// Number of frames that were put into the port's queue directly, of a VM or of none.
    by_hand: u64,
    /// Whether some of these count as more than one packet.
    pub(super) has_gso: bool,
    /// Number of deletions from `FLOWS` that were made to fail. Each may leave a dangling tuple
    /// until the next adoption.
    pub(super) failed_removals: usize,
    /// Packets that last reached the world and the guests.
    pub(super) sent: Vec<Vec<u8>>,
    pub(super) delivered: Vec<(u32, Vec<u8>)>,
}

impl Rig {
    pub(super) fn new(setup: u8) -> Self {
        let kernel = Kernel::new(SLOTS);
        let mut rig = Self {
            kernel,
            engine: None,
            broker: Broker::default(),
            log: Log::default(),
            judge: judge(),
            server: Server::default(),
            setup,
            epoch: 0,
            ids: [0; VMS as usize + 1],
            next_id: 101,
            past: Status::default(),
            by_hand: 0,
            has_gso: false,
            failed_removals: 0,
            sent: Vec::new(),
            delivered: Vec::new(),
        };
        for row in 1..=VMS {
            rig.new_vm(row);
        }
        rig.start();
        rig
    }

    /// Puts a new VM into a row.
    pub(super) fn new_vm(&mut self, row: u16) {
        let id = self.next_id;
        self.next_id += 1;
        self.ids[usize::from(row)] = id;
        let mut kernel = self.kernel.borrow_mut();
        kernel.add_vm(row, id, GUEST, GATEWAY, 1_500);
    }

    /// Starts an engine, as the successor of the last one if there was one.
    pub(super) fn start(&mut self) {
        if let Some(engine) = self.engine.take() {
            add(&mut self.past, engine.status());
        }
        self.epoch += 1;
        self.judge = judge();
        // An engine does not start where it can't sweep.
        self.kernel.borrow_mut().faults.remove_fails = 0;
        self.broker = Broker::default();
        let text = self.log.0.lock().expect("not poisoned").clone();
        let recorded: HashSet<_> =
            recorded_ids(&mut io::Cursor::new(text)).expect("it can be read");
        let mut engine = Engine::new(self.parts()).expect("nothing fails");
        engine.set_network(&network(1_400));
        for row in 1..=VMS {
            self.vm(row).into_iter().for_each(|vm| engine.set_vm(vm));
        }
        engine.begin_adoption(recorded);
        self.engine = Some(engine);
    }

    fn parts(&self) -> Parts<FakeDatapath, FakePort, FakeClock> {
        let few_ports = self.setup & 1 != 0;
        Parts {
            datapath: FakeDatapath::new(&self.kernel, 0, self.epoch),
            port: FakePort::new(&self.kernel),
            clock: FakeClock::new(&self.kernel),
            // No resolver: nothing leaves this process.
            services: Services::new(
                dns::Proxy::new(&[], dns::Limits::default(), Box::new(dns::AllowAll)),
                Relay::new(Limits::default()),
            ),
            judge: self.judge.clone(),
            nat_ports: 61_000..=if few_ports { 61_003 } else { 61_999 },
            log: FlowLog::new(Some(Box::new(self.log.clone()))),
        }
    }

    /// Returns the VM in a row, if there is one.
    pub(super) fn vm(&self, row: u16) -> Option<VmSpec> {
        let id = self.ids[usize::from(row)];
        let is_there = id != 0;
        is_there.then(|| spec(row, id, MAX_FLOWS))
    }

    /// Resolves the name of the inspected server for the VM.
    pub(super) fn tell_name(&self, row: u16) {
        let id = self.ids[usize::from(row)];
        let now_ns = self.kernel.borrow().now_ns;
        inspected::tell(&self.judge, id, now_ns);
    }

    pub(super) fn tell(&mut self, command: impl FnOnce(&mut FuzzEngine) + 'static) {
        self.broker.messages.push(Box::new(command));
    }

    /// Runs one turn of the loop.
    pub(super) fn turn(&mut self) {
        let engine = self.engine.as_mut().expect("started");
        let turned = engine.turn(Some(0), &mut self.broker);
        turned.expect("nothing that stops it");
        let mut kernel = self.kernel.borrow_mut();
        let sent = std::mem::take(&mut kernel.at_world);
        let delivered = std::mem::take(&mut kernel.at_guest);
        sent.iter().for_each(|packet| self.server.sees(packet));
        if !sent.is_empty() {
            self.sent = sent;
        }
        if !delivered.is_empty() {
            self.delivered = delivered;
        }
    }

    pub(super) fn pass(&mut self, ns: u64) {
        self.kernel.borrow_mut().now_ns += ns;
        self.turn();
    }

    /// Puts a frame into the port's queue unchanged.
    pub(super) fn port_frame(&mut self, mut bytes: Vec<u8>) {
        let mut kernel = self.kernel.borrow_mut();
        let header = bytes
            .get_mut(PORT_HEADER_AT..PORT_HEADER_AT + PortHeader::LEN)
            .and_then(|at| at.first_chunk_mut::<{ PortHeader::LEN }>());
        let whole = header.and_then(|at| {
            let mut header = PortHeader::decode(at)?;
            // The programs name rows that exist, and count what they hand over.
            header.vm_row %= ROWS;
            *at = header.encode();
            Some(header)
        });
        if let Some(header) = whole.filter(|_| bytes.len() >= VNET_LEN + PortHeader::LEN + 2) {
            let vm = kernel.vm(header.vm_row);
            let (handed_over, _) = vm.under_way(header.flags & PortFlags::FROM_UPLINK != 0);
            handed_over.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
        self.by_hand += 1;
        self.has_gso |= bytes.get(1).is_some_and(|kind| *kind != 0);
        kernel.queue.push_back(bytes);
    }

    /// Checks the invariants that hold at any time.
    pub(super) fn check(&self) {
        let status = self.status();
        assert_eq!(
            status.frames_returned + status.frames_dropped + status.frames_consumed,
            status.frames_read
        );
        let kernel = self.kernel.borrow();
        let in_use = kernel.slots_in_use().len();
        let most = 2 * in_use + self.failed_removals;
        assert!(kernel.flows.len() <= most, "a tuple without a slot");
        assert!(in_use as u64 >= status.flows);
        assert!(status.flows <= u64::from(SLOTS.min(self.next_id * MAX_FLOWS)));
    }

    /// Lets more time pass than any timer lasts, then checks that nothing is left that an adopter
    /// would not remove, and that the sums agree.
    pub(super) fn end(&mut self) {
        self.kernel.borrow_mut().faults = Faults::default();
        let hours = 3 * 3_600 * SECOND_NS;
        // A session sends again for a minute, and who sends is not silent.
        for ns in [0, hours, hours, 120 * SECOND_NS] {
            self.kernel.borrow_mut().now_ns += ns;
            for _ in 0..8 {
                self.pass(10 * SECOND_NS);
            }
        }
        self.check();
        let status = self.status();
        assert_eq!(self.kernel.borrow().slots_in_use(), []);
        if self.failed_removals > 0 {
            self.start();
        }
        let kernel = self.kernel.borrow();
        assert!(kernel.flows.is_empty(), "{:?}", kernel.flows);
        assert_eq!((status.flows, status.ports_resting), (0, 0));

        let (mut dropped, mut admitted, mut ended) = (0, 0, 0);
        for row in 0..ROWS {
            let (counters, drops) = kernel.stats(row).snapshot();
            dropped += DropReason::ALL
                .iter()
                .map(|reason| drops.get(*reason).packets)
                .sum::<u64>();
            admitted += counters.admitted;
            ended += counters.ended;
        }
        let in_all = kernel.handed_over + self.by_hand;
        assert_eq!(in_all, status.frames_read + kernel.lost);
        let frames = kernel.dropped + status.frames_dropped + status.frames_unsent;
        assert!(dropped == frames || self.has_gso && dropped > frames);
        assert_eq!(admitted, ended);
        let log = self.log.0.lock().expect("not poisoned");
        // Relayed flows (ids begin with `r`) are admitted by nobody's tables.
        let log = String::from_utf8_lossy(&log);
        let of_relays = |line: &str| line.contains("\"id\":\"r");
        let records = log.lines().filter(|line| !of_relays(line)).count();
        assert_eq!(admitted, records as u64, "{log}");
    }

    fn status(&self) -> Status {
        let mut sum = self.engine.as_ref().expect("started").status();
        add(&mut sum, self.past);
        sum
    }
}

fn add(sum: &mut Status, of: Status) {
    sum.frames_read += of.frames_read;
    sum.frames_returned += of.frames_returned;
    sum.frames_dropped += of.frames_dropped;
    sum.frames_consumed += of.frames_consumed;
    sum.frames_unsent += of.frames_unsent;
}

/// Returns rules that open everything but the denied destinations and [`inspected::SERVER`], which
/// only its name opens.
fn judge() -> SharedJudge {
    let by_address =
        |action| move |text: &str| Rule::Match(action, text.parse().expect("a pattern"));
    let denied = ["203.0.113.0/24", "198.51.100.9:443/tcp"].map(by_address(Action::Deny));
    let open = all_but(inspected::SERVER.0.into())
        .map(|net| net.to_string())
        .map(|net| by_address(Action::Allow)(&net));
    let named = Rule::parse(Action::Inspect, inspected::NAME).expect("a rule");
    let rules = denied.into_iter().chain([named]).chain(open).collect();
    Judge::shared(Policy::new(Action::Deny, rules))
}

/// Returns prefixes of every address but this one: for each of its 32 prefixes, the half that does
/// not contain it.
fn all_but(address: Ipv4Addr) -> impl Iterator<Item = Ipv4Net> {
    (1..=32).map(move |len| {
        let other = Ipv4Addr::from_bits(address.to_bits() ^ 1 << (32 - len));
        let half = Ipv4Net::new(other, len).expect("a prefix length");
        half.trunc()
    })
}

pub(super) fn network(mtu: u32) -> NetworkView {
    let net = |a, b, c, d, len| Ipv4Net::new(ip(a, b, c, d).into(), len).expect("a prefix length");
    NetworkView {
        routes: RouteSnapshot {
            vm_uplinks: Vec::new(),
            further: Default::default(),
            uplink_ifindex: Some(UPLINK),
            addresses: vec![HostAddress {
                ifindex: UPLINK,
                addr: net(192, 0, 2, 1, 24).into(),
                broadcast: Some(ip(192, 0, 2, 255).into()),
                source: Default::default(),
            }],
            routes: vec![RouteEntry {
                prefix: net(0, 0, 0, 0, 0).into(),
                kind: RouteKind::Unicast,
                ifindex: UPLINK,
                gateway: Some(ip(192, 0, 2, 254).into()),
                prefsrc: Some(HOST.into()),
                metric: 0,
                mtu: None,
                share: Default::default(),
            }],
        },
        local: LocalAddresses {
            host: vec![HOST.into()],
            guests: vec![net(10, 0, 2, 0, 24).into()],
        },
        links: vec![Link {
            ifindex: UPLINK,
            name: "eth0".into(),
            mtu,
            has_l2: true,
        }],
    }
}
