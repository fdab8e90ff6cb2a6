//! Records of guests' DNS questions.
use std::{
    borrow::Cow,
    net::{IpAddr, SocketAddr},
    time::SystemTime,
};

use slipgate_abi::VmId;

use serde::Serialize;

use slipgate_model::Labels;

use super::{Event, FlowLog, Rfc3339, VmText, wall_at};

/// Most addresses of an answer that are recorded.
pub const MOST_ANSWERS: usize = 16;

/// Most text of the names that an answer led through that is recorded, bytes.
pub const MOST_CHAIN: usize = 2_048;

/// A guest's DNS question and its answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Question {
    /// Id of the VM.
    pub vm: VmId,
    /// Resolver address that the guest asked; `None` when it asked over TCP.
    pub server: Option<IpAddr>,
    /// Name that was asked for, in lower case, without the final dot; empty if it can't be read.
    pub name: String,
    /// Record type that was asked for; 0 if it can't be read.
    pub qtype: u16,
    /// Source of the answer.
    pub source: Source,
    /// Text of the rule that decided whether the name may be asked for, if one did.
    pub rule: Option<String>,
    /// Reason for the refusal, as the guest may read it.
    pub refused: Option<String>,
    /// Response code, with the extended bits.
    pub rcode: u16,
    /// Names that the answer led through beside the one asked for (aliases, targets of services),
    /// in the same form: the first ones, up to [`MOST_CHAIN`] bytes.
    pub chain: Vec<String>,
    /// First [`MOST_ANSWERS`] addresses that the guest received.
    pub addresses: Vec<IpAddr>,
    /// Number of further addresses.
    pub left_out: usize,
    /// Shortest time for which the guest may keep one of them, seconds.
    pub ttl_s: Option<u32>,
    /// Time at which the question arrived, ns.
    pub asked_ns: u64,
    /// Time at which it was answered, ns.
    pub answered_ns: u64,
}

/// Source of the answer that a guest received.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// The policy refused or answered the question, or it was about AAAA, which guests have no use
    /// for.
    Policy,
    /// The cache, which holds earlier answers.
    Cache,
    /// The upstream resolver of this address.
    Upstream(SocketAddr),
    /// The engine's own SERVFAIL, because no resolver answered or there was no room for the
    /// question, or its answer to a message that is not accepted as a query. No rule judged the name
    /// of such a message, and no tool does.
    Nobody,
}

#[derive(Serialize)]
struct Line<'a> {
    event: Event,
    time: Rfc3339,
    vm: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    labels: Option<&'a Labels>,
    name: &'a str,
    r#type: Cow<'static, str>,
    transport: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    server: Option<IpAddr>,
    verdict: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    rule_text: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<&'a str>,
    rcode: Cow<'static, str>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    chain: &'a [String],
    answers: &'a [IpAddr],
    #[serde(skip_serializing_if = "is_zero")]
    answers_left_out: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    ttl_s: Option<u32>,
    source: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    upstream: Option<SocketAddr>,
    latency_us: u64,
}

fn is_zero(n: &usize) -> bool {
    *n == 0
}

impl FlowLog {
    /// Buffers the record of a question. `now`: the wall-clock time at `now_ns`.
    pub fn dns(&mut self, question: &Question, vm: VmText<'_>, now_ns: u64, now: SystemTime) {
        let latency_ns = question.answered_ns.saturating_sub(question.asked_ns);
        let line = Line {
            event: Event::Dns,
            time: Rfc3339(wall_at(question.asked_ns, now_ns, now)),
            vm: vm.name,
            labels: vm.labels,
            name: &question.name,
            r#type: type_name(question.qtype),
            transport: if question.server.is_some() {
                "udp"
            } else {
                "tcp"
            },
            server: question.server,
            verdict: match (&question.refused, question.source) {
                (Some(_), _) => "refused",
                (None, Source::Nobody) => "failed",
                (None, _) => "allowed",
            },
            rule_text: question.rule.as_deref(),
            why: question.refused.as_deref(),
            rcode: rcode_name(question.rcode),
            chain: &question.chain,
            answers: &question.addresses,
            answers_left_out: question.left_out,
            ttl_s: question.ttl_s,
            source: match question.source {
                Source::Policy => "policy",
                Source::Cache => "cache",
                Source::Upstream(_) => "upstream",
                Source::Nobody => "none",
            },
            upstream: match question.source {
                Source::Upstream(resolver) => Some(resolver),
                _ => None,
            },
            latency_us: latency_ns / 1_000,
        };
        self.push(Event::Dns, question.vm, &line);
    }
}

/// Returns the name of a record type (IANA, "DNS Parameters"); a type without a name as RFC 3597
/// section 5 writes it.
fn type_name(qtype: u16) -> Cow<'static, str> {
    Cow::Borrowed(match qtype {
        1 => "A",
        2 => "NS",
        5 => "CNAME",
        6 => "SOA",
        10 => "NULL",
        12 => "PTR",
        15 => "MX",
        16 => "TXT",
        28 => "AAAA",
        33 => "SRV",
        35 => "NAPTR",
        43 => "DS",
        48 => "DNSKEY",
        64 => "SVCB",
        65 => "HTTPS",
        255 => "ANY",
        257 => "CAA",
        other => return Cow::Owned(format!("TYPE{other}")),
    })
}

/// Returns the name of a response code (IANA, "DNS RCODEs").
fn rcode_name(rcode: u16) -> Cow<'static, str> {
    Cow::Borrowed(match rcode {
        0 => "NOERROR",
        1 => "FORMERR",
        2 => "SERVFAIL",
        3 => "NXDOMAIN",
        4 => "NOTIMP",
        5 => "REFUSED",
        16 => "BADVERS",
        other => return Cow::Owned(format!("RCODE{other}")),
    })
}
