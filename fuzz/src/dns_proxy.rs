//! The whole DNS proxy under rules by name: guests' questions, upstream queries and their answers.
//!
//! Input: `steps …`, each `what (1) | bytes behind their length (2)`, see [`step`]. The resolver is
//! a socket on loopback. Checked for any input: only names that the rules allow go upstream, each
//! reply answers its question, and only addresses from answers are open.
use std::net::{SocketAddr, UdpSocket};

use slipgate_abi::Protocol;
use slipgate_policy::{Action, DenyFile, Destination, LocalAddresses, Name, Policy, Rule};
use userspace_nat::{
    dns::{AsTheHost, Guest, Limits, Origin, Proxy, message::HEADER_LEN, query::Query},
    name_gate::{ByRules, Judge},
    poll::{Poller, Readiness},
    vm::VmNet,
};

use crate::{
    tape::Tape,
    vms::{HOST, spec, with_vm},
};

/// Maximum number of steps in a run.
const MAX_STEPS: usize = 24;
const SECOND_NS: u64 = 1_000_000_000;
/// Time for which a datagram on loopback is awaited, ns.
const WAIT_NS: u64 = 20_000_000;

/// Kinds of steps, by the use of the step's bytes.
pub(crate) mod step {
    /// The bytes are a guest's message.
    pub(crate) const ASK: u8 = 0;
    /// The bytes are labels beneath a name that may be asked for; the first byte is the type.
    pub(crate) const ASK_BENEATH: u8 = 1;
    /// The bytes are the resolver's whole answer.
    pub(crate) const ANSWER: u8 = 2;
    /// The bytes follow a correct header and question; the first three are the section counts.
    pub(crate) const ANSWER_RIGHT: u8 = 3;
    /// The first byte is a number of seconds by which the clock advances.
    pub(crate) const PASS: u8 = 4;
    /// Number of kinds of steps.
    pub(crate) const COUNT: u8 = 5;
}

struct Rig {
    proxy: Proxy,
    judge: userspace_nat::name_gate::SharedJudge,
    poller: Poller,
    resolver: UdpSocket,
    asked: Vec<(Vec<u8>, SocketAddr)>,
    now_ns: u64,
}

/// Performs the steps that the input describes.
pub fn dns_proxy(input: &[u8]) {
    with_vm(spec(1, 1, 10), |vm| run(&vm, Tape::new(input)));
}

fn run(vm: &VmNet, mut tape: Tape<'_>) {
    let resolver = UdpSocket::bind("127.0.0.1:0").expect("loopback");
    resolver.set_nonblocking(true).expect("a socket");
    let judge = Judge::shared(policy());
    let upstream = resolver.local_addr().expect("a bound socket");
    let by = Box::new(ByRules(judge.clone()));
    let mut rig = Rig {
        proxy: Proxy::new(&[upstream], Limits::default(), by),
        judge,
        poller: Poller::new().expect("an epoll set"),
        resolver,
        asked: Vec::new(),
        now_ns: SECOND_NS,
    };
    for _ in 0..MAX_STEPS {
        if tape.is_at_end() {
            break;
        }
        let what = tape.u8() % step::COUNT;
        let bytes = tape.bytes();
        rig.step(vm, what, bytes);
        rig.check(vm);
    }
}

fn policy() -> Policy {
    let file = DenyFile::parse("denied", "*.denied.ok.test\n192.0.2.0/24\n");
    let mut policy = Policy::new(
        Action::Deny,
        vec![
            Rule::DenyFile(Box::new(file.expect("two lines"))),
            Rule::parse(Action::Deny, "bad.ok.test").expect("a rule"),
            Rule::parse(Action::Inspect, "*.ok.test:443").expect("a rule"),
        ],
    );
    policy.set_local(&LocalAddresses {
        host: vec![HOST.into()],
        guests: Vec::new(),
    });
    policy
}

/// Decides, independently of the code under test, whether the rules above allow a name.
fn may_be_asked(name: &str) -> bool {
    name.ends_with(".ok.test") && name != "bad.ok.test" && !name.ends_with(".denied.ok.test")
}

impl Rig {
    fn step(&mut self, vm: &VmNet, what: u8, bytes: &[u8]) {
        match what {
            step::ASK => self.ask(vm, bytes),
            step::ASK_BENEATH => self.ask(vm, &beneath(bytes)),
            step::ANSWER | step::ANSWER_RIGHT => {
                let Some((query, from)) = self.asked.pop() else {
                    return;
                };
                let answer = match what {
                    step::ANSWER => bytes.to_vec(),
                    _ => right(&query, bytes),
                };
                let _ = self.resolver.send_to(&answer, from);
                self.settle();
            }
            _ => {
                let seconds = bytes.first().copied().unwrap_or(1);
                self.now_ns += u64::from(seconds) * SECOND_NS;
                self.proxy.on_timer(&self.poller, self.now_ns);
            }
        }
    }

    fn ask(&mut self, vm: &VmNet, message: &[u8]) {
        let origin = Origin::Tcp { connection: 1 };
        // As one without IPv6, and as one with it.
        let guest = Guest {
            vm,
            has_ipv6: message.len() % 2 == 1,
            ways: &AsTheHost,
        };
        let _ = self
            .proxy
            .query(guest, origin, message, &self.poller, self.now_ns);
    }

    fn settle(&mut self) {
        let mut ready: Vec<Readiness> = Vec::new();
        let _ = self.poller.wait(Some(WAIT_NS), &mut ready);
        for readiness in ready {
            self.proxy.on_ready(readiness, &self.poller, self.now_ns);
        }
    }

    fn check(&mut self, vm: &VmNet) {
        let mut buffer = [0; 2_000];
        while let Ok((len, from)) = self.resolver.recv_from(&mut buffer) {
            let query = Query::parse(&buffer[..len]).expect("what goes upstream is a query");
            let name = query.name.to_ascii_lowercase();
            let name = Name(&name).without_dot();
            assert!(may_be_asked(&name), "{name}");
            assert!(![10, 16, 255].contains(&query.qtype), "NULL, TXT, ANY");
            assert_eq!(query.qclass, 1);
            self.asked.push((buffer[..len].to_vec(), from));
        }
        while let Some(reply) = self.proxy.next_reply() {
            assert!(reply.message.len() >= HEADER_LEN && reply.message[2] & 0x80 != 0);
            // No key for a hidden name where connections are inspected.
            assert!(!has_ech(&reply.message));
        }
        let judge = self.judge.borrow();
        for addr in [[192, 0, 2, 7], [10, 0, 0, 1], [127, 0, 0, 1], HOST.octets] {
            let to = Destination {
                addr: addr.into(),
                port: 443,
                protocol: Protocol::Tcp,
            };
            let decision = judge.decide(vm.id, to, self.now_ns).decision;
            assert!(!decision.is_allowed(), "{to:?}");
        }
    }
}

/// Returns a query for labels beneath `ok.test`.
fn beneath(bytes: &[u8]) -> Vec<u8> {
    let (qtype, rest) = bytes.split_first().unwrap_or((&1, &[]));
    let mut message = vec![0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in rest.chunks(20).take(8) {
        message.push(label.len() as u8);
        message.extend(label);
    }
    message.extend(b"\x02ok\x04test\0\0");
    message.extend([*qtype, 0, 1]);
    message
}

/// Returns an answer to `query` with these counts and records.
fn right(query: &[u8], bytes: &[u8]) -> Vec<u8> {
    let mut tape = Tape::new(bytes);
    let counts = tape.array::<3>();
    let question = Query::parse(query).map_or(0, |q| q.name.len() + 4);
    let mut answer = query[..HEADER_LEN + question].to_vec();
    answer[2] = 0x81;
    answer[3] = 0x80;
    for (at, count) in [7, 9, 11].into_iter().zip(counts) {
        answer[at] = count;
    }
    answer.extend(tape.rest());
    answer
}

/// Whether the first answer is an HTTPS record of the plain form with the parameter `ech`.
fn has_ech(message: &[u8]) -> bool {
    let Ok(name) = question_name(message) else {
        return false;
    };
    let at = HEADER_LEN + name + 4;
    let Some(record) = message.get(at..) else {
        return false;
    };
    // A pointer to the question, type, class, TTL, length; priority, the root as target.
    let plain = record.len() > 15 && record[0] == 0xc0 && record[2..4] == [0, 65];
    if message[6..8] == [0, 0] || !plain || record[14] != 0 {
        return false;
    }
    let end = 12 + usize::from(u16::from_be_bytes([record[10], record[11]]));
    let mut params = record.get(15..end).unwrap_or(&[]);
    while let [high, low, len_high, len_low, rest @ ..] = params {
        if [*high, *low] == [0, 5] {
            return true;
        }
        let len = usize::from(u16::from_be_bytes([*len_high, *len_low]));
        params = rest.get(len..).unwrap_or(&[]);
    }
    false
}

/// Returns the length of the question's name, octets.
fn question_name(message: &[u8]) -> Result<usize, ()> {
    let mut at = HEADER_LEN;
    loop {
        match message.get(at).ok_or(())? {
            0 => return Ok(at + 1 - HEADER_LEN),
            len => at += 1 + usize::from(*len),
        }
    }
}
