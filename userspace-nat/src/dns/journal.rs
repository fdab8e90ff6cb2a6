//! Records of answered and refused questions, kept until the engine fetches them.
use std::{collections::VecDeque, net::IpAddr};

use slipgate_abi::VmId;

use super::{
    answer::{Answer, MAX_TTL_S},
    chain::Chain,
    in_flight::Waiter,
    message::Rcode,
    name::Name,
    policy::{ExtendedError, NamePolicy},
    proxy::Origin,
    query::{self, Key},
};
use crate::{
    record::{MOST_ANSWERS, MOST_CHAIN, Question, Source},
    stats::{Tally, VmStats},
};

/// Most records kept; a turn of the event loop makes far fewer.
const MOST_WAITING: usize = 8_192;

/// Records that were not fetched yet. A closed journal takes none.
#[derive(Debug, Default)]
pub(super) struct Journal {
    open: bool,
    questions: VecDeque<Question>,
}

/// Reply that a guest receives.
#[derive(Clone, Copy, Debug)]
pub(super) enum ReplyKind<'a> {
    Refused(&'a ExtendedError),
    /// An answer, and its age in seconds.
    Answered(&'a Answer, u32),
    /// A reply with SERVFAIL.
    Failed,
}

impl Journal {
    pub(super) fn set_open(&mut self, open: bool) {
        self.open = open;
    }

    pub(super) fn next(&mut self) -> Option<Question> {
        self.questions.pop_front()
    }

    pub(super) fn note(
        &mut self,
        policy: &dyn NamePolicy,
        waiter: &Waiter,
        key: Key<'_>,
        outcome: ReplyKind<'_>,
        source: Source,
        now_ns: u64,
    ) {
        if !self.has_room(&waiter.stats) {
            return;
        }
        let mut question = Question {
            vm: waiter.vm,
            server: server(waiter.origin),
            name: key.name().without_dot(),
            qtype: key.qtype(),
            source,
            rule: policy.rule(waiter.vm, key.name()),
            refused: None,
            rcode: 0,
            chain: Vec::new(),
            addresses: Vec::new(),
            left_out: 0,
            ttl_s: None,
            asked_ns: waiter.since_ns,
            answered_ns: now_ns,
        };
        match outcome {
            ReplyKind::Refused(error) => {
                question.rcode = error.rcode as u16;
                question.refused = Some(error.text.clone());
            }
            ReplyKind::Failed => question.rcode = Rcode::ServFail as u16,
            ReplyKind::Answered(answer, age_s) => {
                question.rcode = u16::from(answer.extended_rcode) << 4 | answer.rcode();
                question.chain = chain(answer, key.name());
                for (address, ttl_s) in answer.addresses() {
                    let left_s = ttl_s.saturating_sub(age_s).min(MAX_TTL_S);
                    question.ttl_s = Some(question.ttl_s.map_or(left_s, |ttl| ttl.min(left_s)));
                    match question.addresses.len() < MOST_ANSWERS {
                        true => question.addresses.push(address),
                        false => question.left_out += 1,
                    }
                }
            }
        }
        self.questions.push_back(question);
    }

    /// Notes a message that was not accepted as a query, with its question as far as it can be read,
    /// and the code with which it was answered. `error`: it was refused, for this reason. The source
    /// says that the name was not judged, nor would be below the rate.
    pub(super) fn note_unaccepted(
        &mut self,
        (vm, stats): (VmId, &VmStats),
        origin: Origin,
        message: &[u8],
        rcode: Rcode,
        error: Option<ExtendedError>,
        now_ns: u64,
    ) {
        if !self.has_room(stats) {
            return;
        }
        let (name, qtype) = query::question_of(message).unwrap_or_default();
        self.questions.push_back(Question {
            vm,
            server: server(origin),
            name,
            qtype,
            source: Source::Nobody,
            rule: None,
            refused: error.map(|error| error.text),
            rcode: rcode as u16,
            chain: Vec::new(),
            addresses: Vec::new(),
            left_out: 0,
            ttl_s: None,
            asked_ns: now_ns,
            answered_ns: now_ns,
        });
    }

    /// Whether a record is to be kept. One for which there is no room is counted.
    fn has_room(&self, stats: &VmStats) -> bool {
        let has_room = self.questions.len() < MOST_WAITING;
        if self.open && !has_room {
            stats.tally(Tally::RecordLost, 1);
        }
        self.open && has_room
    }
}

/// Address that the guest asked; `None` when it asked over TCP.
fn server(origin: Origin) -> Option<IpAddr> {
    match origin {
        Origin::Udp { server, .. } => Some(server),
        Origin::Tcp { .. } => None,
    }
}

/// Names in the answer's chain, as text. They are truncated, because their owner may choose long
/// ones.
fn chain(answer: &Answer, asked: Name<'_>) -> Vec<String> {
    let steps = Chain::of(answer, asked).unwrap_or_default().steps;
    let mut room = MOST_CHAIN;
    let mut names = Vec::new();
    for step in &steps {
        let name = Name(step).without_dot();
        let Some(left) = room.checked_sub(name.len()) else {
            break;
        };
        room = left;
        names.push(name);
    }
    names
}

#[cfg(test)]
#[path = "journal_test.rs"]
mod tests;
