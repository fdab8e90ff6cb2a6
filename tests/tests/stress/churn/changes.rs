//! Clients of the API that add, change and remove VMs and put policies, at random and at a pace.

use std::{
    collections::BTreeMap,
    ops::Range,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use slipgate_testbed::{
    clients::api::{ApiAnswer, ApiClient},
    impairment::SplitMix64,
    world::SERVER,
};

use crate::below;

/// Number of changes a second, of all clients together.
pub(super) const PER_SECOND: u32 = 50;
/// Number of clients. Each waits for its answer: for the next engine, or for its change of policy.
const CLIENTS: u32 = 16;
/// VMs that come and go and have a TAP.
pub(super) const WITH_TAP: usize = 6;
/// VMs that come and go, and wait for a TAP that never comes.
const WITHOUT_TAP: usize = 8;
/// Ports of the host of which VMs forward some, fewer than they would like to have.
pub(super) const FORWARDED: Range<u16> = 20_000..20_024;
/// Policies that are put again and again.
pub(super) const POLICIES: [&str; 3] = ["first", "second", "third"];
/// Ports of the servers to which VMs that come and go connect.
pub(super) const SERVERS: Range<u16> = 7_100..7_104;

/// Refusals that requests at the same time lead to: status, and a part of the problem's detail.
const REFUSALS: [(u16, &str); 6] = [
    (404, "is served: GET /v1/vms lists those that are"),
    (404, "the VM was removed meanwhile"),
    (409, "of the host leads to c"),
    // Of a VM that is just giving it back.
    (409, "of the host: it is taken by"),
    // Flows keep the numbers of the rules that admitted them.
    (422, "and some of these are named by flows"),
    (503, "is changed all the time: try again"),
];

/// The name of a VM that comes and goes, which is also its TAP's.
pub(super) fn name(vm: usize) -> String {
    format!("c{vm}")
}

/// Threads of clients that make requests.
pub(super) struct Clients(Vec<JoinHandle<Tally>>);

/// Outcome of the clients' requests.
#[derive(Debug, Default)]
pub(super) struct Tally {
    /// Changes that were carried out, by kind.
    pub(super) made: BTreeMap<&'static str, u64>,
    /// Requests that were refused as expected, by the reason.
    pub(super) refused: BTreeMap<String, u64>,
    /// Answers that are neither success nor an expected refusal.
    pub(super) unexpected: Vec<String>,
    /// Times until the answers.
    took: Vec<Duration>,
}

impl Clients {
    /// Has clients make the changes of this time at their pace. A machine busy with other things
    /// takes longer.
    pub(super) fn start(socket: &Path, span: Duration, random: &mut SplitMix64) -> Self {
        let is_there: Arc<[AtomicBool]> = (0..WITH_TAP + WITHOUT_TAP)
            .map(|_| AtomicBool::new(false))
            .collect();
        let began = Instant::now();
        let each = (span * PER_SECOND / CLIENTS).as_secs() as u32;
        let start = |_| {
            let client = Client {
                socket: socket.to_owned(),
                is_there: is_there.clone(),
                random: SplitMix64(random.next()),
                tally: Tally::default(),
            };
            std::thread::spawn(move || client.run(began, each))
        };
        Self((0..CLIENTS).map(start).collect())
    }

    /// Whether all of them have made their changes.
    pub(super) fn are_done(&self) -> bool {
        self.0.iter().all(JoinHandle::is_finished)
    }

    /// Waits until all of them have made their changes.
    pub(super) fn finish(self) -> Tally {
        let mut all = Tally::default();
        for thread in self.0 {
            let tally = thread.join().unwrap();
            for (kind, times) in tally.made {
                *all.made.entry(kind).or_default() += times;
            }
            for (why, times) in tally.refused {
                *all.refused.entry(why).or_default() += times;
            }
            all.unexpected.extend(tally.unexpected);
            all.took.extend(tally.took);
        }
        all.took.sort_unstable();
        all
    }
}

impl Tally {
    /// Number of changes that were carried out.
    pub(super) fn changes(&self) -> u64 {
        self.made.values().sum()
    }

    /// The time within which this share of the requests was answered.
    pub(super) fn percentile(&self, percent: usize) -> Duration {
        let at = (self.took.len() * percent / 100).min(self.took.len() - 1);
        self.took[at]
    }
}

struct Client {
    socket: PathBuf,
    /// VMs that were there when a client last had an answer about them.
    is_there: Arc<[AtomicBool]>,
    random: SplitMix64,
    tally: Tally,
}

/// A request, the VM that it is about, and whether that is there once it has been carried out.
struct Change {
    kind: &'static str,
    method: &'static str,
    path: String,
    body: String,
    leaves: Option<(usize, bool)>,
}

impl Client {
    /// Makes this client's part of the changes, at its part of the pace; faster when it is late.
    fn run(mut self, began: Instant, number: u32) -> Tally {
        let mut api = ApiClient::connect(&self.socket).unwrap();
        let mut made = 0;
        while made < number {
            let due = began + Duration::from_secs(1) * made * CLIENTS / PER_SECOND;
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            let change = self.any_change();
            let asked = Instant::now();
            let answer = api.ask(change.method, &change.path, &change.body);
            self.tally.took.push(asked.elapsed());
            match answer {
                Ok(answer) => made += u32::from(self.note(&change, &answer)),
                Err(error) => {
                    let told = format!("{} {}: {error}", change.kind, change.path);
                    self.tally.unexpected.push(told);
                    return self.tally;
                }
            }
        }
        self.tally
    }

    /// Notes an answer. Returns whether the change was made.
    fn note(&mut self, change: &Change, answer: &ApiAnswer) -> bool {
        let ApiAnswer { status, body } = answer;
        if answer.is_success() {
            *self.tally.made.entry(change.kind).or_default() += 1;
            if let Some((vm, is_there)) = change.leaves {
                self.is_there[vm].store(is_there, Relaxed);
            }
            return true;
        }
        let known = REFUSALS
            .iter()
            .find(|(code, part)| code == status && body.contains(part));
        match known {
            Some((status, part)) => {
                let why = format!("{}: {status} {part}", change.kind);
                *self.tally.refused.entry(why).or_default() += 1;
            }
            None => self.tally.unexpected.push(format!(
                "{} {} {}: {status} {body}",
                change.method, change.path, change.body
            )),
        }
        false
    }

    fn below(&mut self, end: u64) -> u64 {
        below(&mut self.random, end)
    }

    fn any_change(&mut self) -> Change {
        if self.below(8) == 0 {
            let policy = POLICIES[self.below(POLICIES.len() as u64) as usize];
            return Change {
                kind: "policy put",
                method: "PUT",
                path: format!("/v1/policies/{policy}"),
                body: self.policy_text(),
                leaves: None,
            };
        }
        let vm = self.below(self.is_there.len() as u64) as usize;
        let is_there = self.is_there[vm].load(Relaxed);
        let (kind, method, body) = match self.below(10) {
            _ if !is_there => ("VM put", "PUT", self.definition(vm)),
            0..2 => ("VM put again", "PUT", self.definition(vm)),
            2..7 => ("VM patched", "PATCH", self.patch()),
            _ => ("VM deleted", "DELETE", Value::Null),
        };
        Change {
            kind,
            method,
            path: format!("/v1/vms/{}", name(vm)),
            body: body.to_string(),
            leaves: Some((vm, method != "DELETE")),
        }
    }

    fn definition(&mut self, vm: usize) -> Value {
        let mut body = json!({
            "tap": name(vm),
            "labels": self.labels(),
            "quotas": self.quotas(),
            "forwards": self.forwards(),
        });
        let policy = self.policy();
        if !policy.is_null() {
            body["policy"] = policy;
        }
        body
    }

    fn patch(&mut self) -> Value {
        match self.below(6) {
            0 => json!({ "labels": self.labels() }),
            1 => json!({ "quotas": self.quotas() }),
            2..4 => json!({ "forwards": self.forwards() }),
            4 => json!({ "policy": self.policy() }),
            _ => json!({ "policy": self.policy(), "forwards": self.forwards() }),
        }
    }

    fn labels(&mut self) -> Value {
        json!({ "tenant": format!("t{}", self.below(100)) })
    }

    fn quotas(&mut self) -> Value {
        json!({ "max_flows": 100 + self.below(100), "new_flows_per_second": 500 })
    }

    fn forwards(&mut self) -> Vec<String> {
        let mut ports: Vec<u64> = (0..self.below(3))
            .map(|_| u64::from(FORWARDED.start) + self.below(FORWARDED.len() as u64))
            .collect();
        ports.dedup();
        let of = |port| [format!("tcp:{port}:80"), format!("udp:{port}:80")];
        ports.into_iter().flat_map(of).collect()
    }

    /// None, one by name, or the VM's own.
    fn policy(&mut self) -> Value {
        match self.below(4) {
            0 => Value::Null,
            1 => {
                let port = u64::from(SERVERS.start) + self.below(SERVERS.len() as u64);
                let rule = format!("{SERVER}:{port}/tcp");
                json!({ "default": "deny", "rules": [{ "allow": rule }] })
            }
            _ => POLICIES[self.below(POLICIES.len() as u64) as usize].into(),
        }
    }

    fn policy_text(&mut self) -> String {
        let port = u64::from(SERVERS.start) + self.below(SERVERS.len() as u64);
        match self.below(3) {
            0 => "default = \"allow\"\n".into(),
            1 => format!("default = \"allow\"\nrules = [{{ deny = \"{SERVER}:{port}/tcp\" }}]\n"),
            _ => format!("default = \"deny\"\nrules = [{{ allow = \"{SERVER}:{port}/tcp\" }}]\n"),
        }
    }
}
