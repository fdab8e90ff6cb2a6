//! virtio-vsock: an arbitrary guest with its packets and buffers, programs of the host, and who
//! connects the guest to them.
//!
//! Input: `features (8) | knobs (1) | steps …`. Knobs: bit 0, the driver has a queue for events; bit
//! 1, nobody connects the guest. Steps: see [`what`]. Each stream has bytes of its own, so that what
//! arrives is seen to be the right bytes in order.
mod driver;
mod host;
mod known;

use std::{
    collections::{BTreeMap, VecDeque},
    fs,
    net::Shutdown,
    os::{fd::OwnedFd, unix::net::UnixStream},
    sync::{Arc, Once},
};

use nix::{
    libc,
    sys::socket::{setsockopt, sockopt},
};
use slipgate_vmm::virtio::{
    Signals,
    vsock::{
        Connector, MAX_CONNECTIONS, MAX_REQUESTS, MAX_RESETS, VsockConfig, VsockCounters,
        WINDOW_BYTES,
        stepped::{Serving, Stepped},
    },
};

use crate::tape::Tape;
use driver::{Driver, EVENTS, RX, SLOT_BYTES, TX};
use host::{Connects, Door, Program, bytes_of};
use known::{Known, Ports, Sent, Stage};

/// Kinds of steps, by their first byte.
pub(crate) mod what {
    /// Send a packet: `which | operation | how | bytes (2) | room | times`. `which`: below 0x80 one of
    /// the guest's own connections, else one that a program asked for. `how`: bits of
    /// [`super::how`]. `bytes`: the length of its data; the two lower bits are its flags too. `room`:
    /// the power of two of the guest's buffer, none of it from 33 on.
    pub(crate) const PACKET: u8 = 0;
    /// Lend buffers for packets: `number | bytes (2) | split`, the bytes behind the header. With the
    /// upper bit of `number` they have none for the header.
    pub(crate) const LEND: u8 = 1;
    /// Programs connect: `line | times`. `line` is the kind of what they say first.
    pub(crate) const CALL: u8 = 2;
    /// Answer a request: `which | how`. 0: by a program; 1: by one that is gone; 2: by one whose
    /// socket takes little at a time; else it is refused.
    pub(crate) const ANSWER: u8 = 3;
    /// A program does something: `which | what | bytes (2)`. `what`: 0 writes, 1 reads, 2 sends no
    /// more, 3 reads no more, 4 closes.
    pub(crate) const PROGRAM: u8 = 4;
    /// Move packets and take signals until there is nothing to do.
    pub(crate) const ALL: u8 = 5;
    /// Move packets once.
    pub(crate) const EXCHANGE: u8 = 6;
    /// Take signals once.
    pub(crate) const SIGNALS: u8 = 7;
    /// All requests have waited too long.
    pub(crate) const EXPIRE: u8 = 8;
    /// Who connects the guest is gone.
    pub(crate) const GONE: u8 = 9;
    /// Reset and initialize the device again: `restored`. Not 0: it was saved and restored.
    pub(crate) const RESET: u8 = 10;
    /// Write a descriptor and offer it: `queue | index | address (8) | bytes (4) | flags | next | by`.
    pub(crate) const RAW: u8 = 11;
    /// Write memory: `eighth (2) | length (2) | bytes`.
    pub(crate) const WRITE: u8 = 12;
}

/// What is unusual about a packet.
pub(crate) mod how {
    /// Another source than the guest.
    pub(crate) const SOURCE: u8 = 1;
    /// Another destination than the host.
    pub(crate) const DESTINATION: u8 = 2;
    /// Of another type.
    pub(crate) const KIND: u8 = 4;
    /// Longer by its header than it is.
    pub(crate) const LENGTH: u8 = 8;
    /// In two buffers, the first of which is a part of the header.
    pub(crate) const SPLIT: u8 = 16;
    /// The guest says of each byte that it has gone on, else of none.
    pub(crate) const FORWARDED: u8 = 32;
    /// Without a whole header.
    pub(crate) const CUT: u8 = 64;
    /// Of a connection of its own, another one each time.
    pub(crate) const STRANGE: u8 = 128;

    /// With one of these the packet is none of its connection.
    pub(super) const WRONG: u8 = SOURCE | DESTINATION | KIND | LENGTH | CUT | STRANGE;
}

/// Operations of packets (virtio 1.2, 5.10.6).
pub(crate) mod op {
    pub(crate) const REQUEST: u16 = 1;
    pub(crate) const RESPONSE: u16 = 2;
    pub(crate) const RST: u16 = 3;
    pub(crate) const SHUTDOWN: u16 = 4;
    pub(crate) const RW: u16 = 5;
    pub(crate) const CREDIT_UPDATE: u16 = 6;
    pub(crate) const CREDIT_REQUEST: u16 = 7;
}

const CID: u64 = 7;
const HOST: u64 = 2;
const HEADER_BYTES: usize = 44;
/// Room of a socket that takes little at a time, bytes: the least that Linux allows.
const LITTLE_ROOM_BYTES: usize = 4_608;

/// Ports of the guest's own connections: those of the host, and of the guest.
const OWN: (u32, u32) = (2_000, 3_000);
/// Ports of connections that only [`how::STRANGE`] has.
const STRANGE: u32 = 9_000;
/// First port to which programs connect, each to one of its own.
const CALLED: u32 = 1_000_000;
const MAX_PROGRAMS: usize = 400;
/// Most programs that wait to be accepted.
const MAX_WAITING: usize = 64;
/// Most turns until there is nothing to do: the buffers that are there are used up before.
const TURNS: usize = 200;
/// Rounds in which no byte comes after which none will: by then the short buffers and the RSTs that
/// were before are gone.
const IDLE_ROUNDS: usize = 100;

/// Performs the steps that the input describes. Bytes arrive unchanged, in order, and at last all of
/// them; the guest gets no more than it has room for; a connection ends when an end has ended it or
/// the guest broke the rules. All that there is is bounded, and nothing is left at the end.
pub fn vsock(input: &[u8]) {
    ignore_broken_pipes();
    let before = open_descriptors();
    play(input);
    assert_eq!(open_descriptors(), before, "descriptors are left");
}

fn play(input: &[u8]) {
    let mut tape = Tape::new(input);
    let features = u64::from_le_bytes(tape.array());
    let knobs = tape.u8();
    let (door, listener) = Door::new();
    let connects = Connects::new();
    let connector: Option<Box<dyn Connector>> = match knobs & 2 {
        0 => Some(Box::new(connects.clone())),
        _ => None,
    };
    let config = VsockConfig {
        cid: CID as u32,
        listener,
        connector,
    };
    let counters = Arc::new(VsockCounters::default());
    let device = Stepped::new(config, counters.clone()).expect("a device");
    let mut rig = Rig {
        driver: Driver::new(),
        door,
        connects,
        programs: Vec::new(),
        waiting: 0,
        connections: BTreeMap::new(),
        sent: VecDeque::new(),
        strange: 0,
        is_hostile: false,
        is_wild: false,
    };
    let mut restored = None;
    loop {
        let queues = rig.begin(knobs & 1 != 0);
        let serving = device.serve(
            rig.driver.memory.clone(),
            features & (1 | 1 << 28 | 1 << 29),
            &queues,
            &Nobody,
            restored,
        );
        let told = match knobs & 1 {
            0 => 0,
            _ => rig.driver.take_back(EVENTS).len(),
        };
        assert_eq!(told, usize::from(restored.is_some() && knobs & 1 != 0));
        let mut serving = Some(serving.expect("the rings are within memory"));
        restored = loop {
            if tape.is_at_end() {
                rig.all(&mut serving);
                rig.settle(&mut serving);
                return;
            }
            match tape.u8() {
                what::RESET => break Some(tape.u8()).filter(|it| *it != 0).map(u32::from),
                step => rig.step(step, &mut tape, &mut serving),
            }
        };
    }
}

struct Nobody;

impl Signals for Nobody {
    fn queue(&self, _index: u16) {}
    fn config(&self) {}
    fn needs_reset(&self) {}
}

struct Rig {
    driver: Driver,
    door: Door,
    connects: Connects,
    programs: Vec<Program>,
    /// Programs that may not be accepted yet.
    waiting: usize,
    /// Connections by the host's port and the guest's.
    connections: BTreeMap<Ports, Known>,
    sent: VecDeque<Sent>,
    strange: u32,
    /// Whether the driver has broken the rules of the rings since the last reset.
    is_hostile: bool,
    /// Whether rings and packets may be anything.
    is_wild: bool,
}

impl Rig {
    fn begin(&mut self, has_events: bool) -> Vec<slipgate_vmm::virtio::EnabledQueue> {
        let queues = self.driver.begin(has_events);
        if has_events {
            self.driver.lend(EVENTS, 4, 0);
        }
        self.connections = (0..8)
            .map(|own| ((OWN.0 + own, OWN.1 + own), Known::own(own)))
            .collect();
        self.sent.clear();
        self.is_hostile = false;
        self.is_wild = false;
        self.waiting = 0;
        queues
    }

    fn step(&mut self, step: u8, tape: &mut Tape<'_>, serving: &mut Option<Serving<'_>>) {
        match step {
            what::PACKET => self.packet(tape, serving),
            what::LEND => {
                let (number, bytes, split) = (tape.u8(), tape.u16(), tape.u8());
                let header = match number & 0x80 {
                    0 => HEADER_BYTES as u32,
                    _ => 0,
                };
                let bytes = header + u32::from(bytes) % (SLOT_BYTES - HEADER_BYTES as u32);
                self.is_hostile |= bytes < HEADER_BYTES as u32;
                for _ in 0..=number & 0x1f {
                    self.driver.lend(RX, bytes, split.into());
                }
            }
            what::CALL => self.call(tape, serving),
            what::ANSWER => self.answer(tape),
            what::PROGRAM => {
                let (which, what, bytes) = (tape.u8(), tape.u8(), tape.u16());
                let all = self.programs.len().max(1);
                let Some(program) = self.programs.get_mut(usize::from(which) % all) else {
                    return;
                };
                match what {
                    0 => program.write(bytes.into()),
                    1 => drop(program.read(bytes.into())),
                    2 => program.shut(Shutdown::Write),
                    3 => program.shut(Shutdown::Read),
                    4 => program.close(),
                    _ => {}
                }
            }
            what::ALL => self.all(serving),
            what::EXCHANGE => drop(self.exchange(serving)),
            what::SIGNALS => drop(self.signals(serving)),
            what::EXPIRE => {
                if let Some(serving) = serving {
                    serving.expire();
                    assert_eq!(serving.census().pending, 0);
                }
            }
            what::GONE => self.connects.go(),
            what::RAW => {
                let (queue, index) = (u16::from(tape.u8()) % 3, tape.u8().into());
                let address = u64::from_le_bytes(tape.array());
                let bytes = u32::from_le_bytes(tape.array());
                let (flags, next, by) = (tape.u8(), tape.u8().into(), tape.u8().into());
                self.go_wild();
                let fields = (address, bytes, flags, next);
                self.driver.descriptor(queue, index, fields);
                self.driver.offer(queue, index, by);
            }
            what::WRITE => {
                let at = u64::from(tape.u16()) * 8;
                self.go_wild();
                self.driver.write(at, tape.bytes());
            }
            _ => {}
        }
    }

    fn go_wild(&mut self) {
        self.is_hostile = true;
        self.is_wild = true;
        self.programs.iter_mut().for_each(Program::knows_nothing);
    }

    fn packet(&mut self, tape: &mut Tape<'_>, serving: &mut Option<Serving<'_>>) {
        let (which, op, how) = (tape.u8(), u16::from(tape.u8()), tape.u8());
        let (bytes, room, times) = (tape.u16(), tape.u8(), tape.u8());
        let room = 1_u64.checked_shl(room.into()).unwrap_or(0);
        let room = u32::try_from(room).unwrap_or(u32::MAX * u32::from(room >> 32 == 1));
        for _ in 0..times.max(1) {
            if !self.driver.can_send() && self.exchange(serving).is_none() {
                return;
            }
            let own = 8.min(self.connections.len());
            let number = match which & 0x80 {
                0 => usize::from(which) % own,
                _ => own + usize::from(which & 0x7f) % (self.connections.len() - own).max(1),
            };
            let Some(ports) = self.connections.keys().nth(number).copied() else {
                return;
            };
            self.one_packet(ports, op, how, bytes, room);
        }
    }

    fn one_packet(&mut self, ports: Ports, op: u16, how: u8, bytes: u16, room: u32) {
        let has = |bit: u8| how & bit != 0;
        let known = self.connections.get_mut(&ports).expect("it is known");
        let data_bytes = usize::from(bytes) % (SLOT_BYTES as usize - HEADER_BYTES);
        let is_of_it = how & how::WRONG == 0;
        let (mut ports, accepted) = (ports, if has(how::FORWARDED) { known.got } else { 0 });
        if is_of_it && op == op::REQUEST {
            known.made = 0;
        }
        let data = bytes_of(known.stream, known.made, data_bytes);
        if has(how::STRANGE) {
            self.strange = (self.strange + 1) % 1_000;
            ports = (STRANGE + self.strange, STRANGE);
        }
        let mut packet = Vec::new();
        packet.extend((CID + u64::from(has(how::SOURCE))).to_le_bytes());
        packet.extend((HOST + u64::from(has(how::DESTINATION))).to_le_bytes());
        packet.extend(ports.1.to_le_bytes());
        packet.extend(ports.0.to_le_bytes());
        packet.extend((data_bytes as u32 + u32::from(has(how::LENGTH))).to_le_bytes());
        packet.extend((1 + u16::from(has(how::KIND))).to_le_bytes());
        packet.extend(op.to_le_bytes());
        packet.extend(u32::from(bytes & 3).to_le_bytes());
        packet.extend(room.to_le_bytes());
        packet.extend(accepted.to_le_bytes());
        packet.extend(data);
        if has(how::CUT) {
            packet.truncate(HEADER_BYTES - 1);
        }
        let split = if has(how::SPLIT) { 20 } else { 0 };
        if !self.driver.send(&packet, split) {
            return;
        }
        if is_of_it && op == op::RW {
            known.made = known.made.wrapping_add(data_bytes as u32);
        }
        self.sent.push_back(Sent {
            ports: is_of_it.then_some(ports),
            op,
            flags: u32::from(bytes & 3),
            bytes: data_bytes as u32,
            room,
            accepted,
        });
    }

    fn call(&mut self, tape: &mut Tape<'_>, serving: &mut Option<Serving<'_>>) {
        let (line, times) = (tape.u8(), tape.u8() & 0x3f);
        for _ in 0..=times {
            if self.programs.len() == MAX_PROGRAMS
                || self.waiting == MAX_WAITING && self.signals(serving).is_none()
            {
                return;
            }
            let number = self.programs.len() as u32;
            let port = CALLED + number;
            let said = match line & 7 {
                0 | 1 => format!("CONNECT {port}\n"),
                2 => format!("CONNECT {port}\r\n"),
                3 => format!("CONNECT {port}"),
                4 => format!("CONNECT -{port}\n"),
                5 => "CONNECT 4294967296\n".into(),
                6 => "x".repeat(40),
                _ => String::new(),
            };
            let socket = self.door.connect(said.as_bytes());
            let reads = (!self.is_wild).then_some(port);
            let mut program = Program::new(socket, port, reads, true);
            if line & 7 == 1 {
                program.write(100);
            }
            self.programs.push(program);
            self.waiting += 1;
        }
    }

    fn answer(&mut self, tape: &mut Tape<'_>) {
        let (which, how) = (tape.u8(), tape.u8());
        let Some((id, port)) = self.connects.one(which) else {
            return;
        };
        if how > 2 || self.programs.len() == MAX_PROGRAMS {
            self.connects.answer(id, None);
            return;
        }
        let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
        theirs.set_nonblocking(true).expect("a socket");
        if how == 2 {
            let set = setsockopt(&theirs, sockopt::SndBuf, &LITTLE_ROOM_BYTES);
            set.expect("a socket");
        }
        let number = self.programs.len();
        let mut all = self.connections.iter();
        let reads = all.find(|((host, _), _)| *host == port);
        let reads = reads.map(|(_, known)| known.stream);
        let reads = reads.filter(|_| !self.is_wild);
        let mut program = Program::new(ours, CALLED + number as u32, reads, false);
        if how == 1 {
            program.write(100);
            program.close();
        }
        self.programs.push(program);
        let theirs = OwnedFd::from(theirs);
        self.connects.answer(id, Some((theirs, number)));
    }

    /// Moves packets and takes signals until there is nothing to do.
    fn all(&mut self, serving: &mut Option<Serving<'_>>) {
        for _ in 0..TURNS {
            let Some(is_busy) = self.exchange(serving) else {
                return;
            };
            if self.signals(serving) == Some(0) && !is_busy {
                return;
            }
        }
        assert!(self.is_wild, "the device has no rest");
    }

    fn signals(&mut self, serving: &mut Option<Serving<'_>>) -> Option<usize> {
        let taken = serving.as_mut()?.take_signals();
        self.waiting = 0;
        Some(taken.expect("the host waits"))
    }

    /// Moves packets. Returns whether there is more to do at once; `None`: the driver broke a ring.
    fn exchange(&mut self, serving: &mut Option<Serving<'_>>) -> Option<bool> {
        let device = serving.as_mut()?;
        let Ok(is_busy) = device.exchange() else {
            assert!(self.is_hostile, "a ring that is whole");
            *serving = None;
            return None;
        };
        let census = device.census();
        let connections = census.greetings + census.pending + census.connections;
        assert!(connections <= MAX_CONNECTIONS && census.pending <= MAX_REQUESTS);
        assert!(census.resets <= MAX_RESETS + MAX_CONNECTIONS);
        let mut held = census.open.values();
        assert!(held.all(|held| *held <= WINDOW_BYTES as usize));
        if self.is_wild {
            self.driver.forget();
            return Some(is_busy);
        }
        // It takes before it gives.
        for _ in self.driver.take_back(TX) {
            let sent = self.sent.pop_front().expect("each packet once");
            if let Some(ports) = sent.ports {
                let known = self.connections.get_mut(&ports).expect("it is known");
                known.taken(&sent);
            }
        }
        for packet in self.driver.take_back(RX) {
            self.receive(&packet);
        }
        if census.resets == 0 {
            // Of all others that have ended the guest was told.
            let mut open = census.open;
            open.retain(|ports, _| !is_strange(*ports));
            for (ports, known) in &self.connections {
                known.compare(open.remove(ports));
            }
            assert!(open.is_empty(), "{open:?} are not known");
        }
        Some(is_busy)
    }

    /// Checks a packet for the guest.
    fn receive(&mut self, packet: &[u8]) {
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| packet[at + i]));
        let half = |at: usize| u16::from_le_bytes([packet[at], packet[at + 1]]);
        let (ports, bytes, op) = ((word(16), word(20)), word(24), half(30));
        assert_eq!(packet.len(), HEADER_BYTES + bytes as usize);
        let is_right = (word(0), word(8), half(28)) == (HOST as u32, CID as u32, 1);
        if op == op::RST {
            assert_eq!(bytes, 0);
            // Others answer packets that are of no connection.
            if is_right && let Some(known) = self.connections.get_mut(&ports) {
                let program = known.program.map(|stream| &self.programs[of(stream)]);
                known.ended(program.is_some_and(Program::stays));
            }
            return;
        }
        assert!(is_right);
        assert_eq!(word(36), WINDOW_BYTES);
        if is_strange(ports) {
            return;
        }
        if op == op::REQUEST {
            let caller = self.programs.get(of(ports.1));
            let program = caller.expect("a program has called").stream();
            let known = Known::asked(ports.1, program);
            let other = self.connections.insert(ports, known);
            assert!(other.is_none(), "a port that is in use");
            return;
        }
        let known = self.connections.get_mut(&ports);
        let known = known.expect("a connection that somebody asked for");
        if op == op::RESPONSE {
            let program = self.connects.program_at(ports.0);
            let program = program.expect("a program for which the guest has asked");
            known.answered(self.programs[program].stream());
        }
        known.told(word(40));
        if bytes == 0 {
            return;
        }
        assert_eq!(op, op::RW);
        let program = known.program.expect("a connection that is open");
        let expected = bytes_of(program, known.came(bytes), bytes as usize);
        assert!(packet[HEADER_BYTES..] == expected, "other bytes");
    }

    /// Has both ends read all that there is, and checks that all of it comes.
    fn settle(&mut self, serving: &mut Option<Serving<'_>>) {
        self.programs.iter_mut().for_each(Program::read_all);
        let (mut arrived, mut idle) = (self.arrived(), 0);
        while !self.is_hostile
            && let Some(missing) = self.missing()
        {
            assert!(idle < IDLE_ROUNDS, "{missing} does not come");
            while self.driver.lend(RX, SLOT_BYTES, 0) {}
            let all = self.connections.iter();
            let open = all.filter(|(_, known)| known.stage == Stage::Open);
            let open: Vec<Ports> = open.map(|(ports, _)| *ports).collect();
            for ports in open {
                if !self.driver.can_send() {
                    self.exchange(serving);
                }
                // The answer uses a buffer that has room for no more than that.
                self.one_packet(ports, op::CREDIT_REQUEST, how::FORWARDED, 0, 1 << 20);
            }
            self.all(serving);
            self.programs.iter_mut().for_each(Program::read_all);
            let before = std::mem::replace(&mut arrived, self.arrived());
            idle = if arrived == before { idle + 1 } else { 0 };
        }
    }

    /// Returns bytes that were sent and have not come: how many, and whose. `None`: all have.
    fn missing(&self) -> Option<String> {
        let whole = self.connections.values().filter(|known| !known.is_broken);
        for known in whole {
            let program = known.program.map(|stream| &self.programs[of(stream)]);
            let Some(program) = program.filter(|program| program.stays()) else {
                continue;
            };
            // What the program does not know it does not count.
            let got = program.got().unwrap_or(known.taken);
            if got != known.taken {
                return Some(format!("the guest's byte {got} of {}", known.taken));
            }
            let (got, wrote) = (known.got, program.wrote());
            if known.stage == Stage::Open && known.receives && got != wrote {
                return Some(format!("the program's byte {got} of {wrote}"));
            }
        }
        None
    }

    /// Returns how many bytes have come at all ends.
    fn arrived(&self) -> u64 {
        let programs = self.programs.iter().filter_map(Program::got);
        let guest = self.connections.values().map(|known| known.got);
        programs.chain(guest).map(u64::from).sum()
    }
}

/// Returns the number of the program that writes this stream.
fn of(stream: u32) -> usize {
    (stream - CALLED) as usize
}

fn is_strange(ports: Ports) -> bool {
    (STRANGE..STRANGE + 1_000).contains(&ports.0)
}

/// Returns the number of descriptors of this process.
fn open_descriptors() -> usize {
    fs::read_dir("/proc/self/fd").expect("procfs").count()
}

/// Has writes to a socket whose other end is gone fail, as the standard library's `main` does.
fn ignore_broken_pipes() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: no handler is installed.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    });
}
