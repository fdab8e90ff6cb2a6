//! What a policy says of a destination or a name when nobody has asked for it: for people who write
//! one. Walks all rules; nothing here is on a flow's way.
use slipgate_abi::{Protocol, Refusal};

use super::{
    Action, Decision, Destination, NamePattern, Pattern, Policy, Rule, RuleId, explain::target,
    protected::everywhere,
};
use crate::dns::{DNS_PORT, Name};

/// Rules by address that are told of a name.
const SHOWN_RULES: usize = 8;

/// One rule, as it stands in a policy.
#[derive(Clone, Copy, Debug)]
pub struct Standing<'p> {
    /// Its number.
    pub id: RuleId,
    /// The rule.
    pub rule: &'p Rule,
}

impl Policy {
    /// The rules, in order.
    pub fn standing(&self) -> impl Iterator<Item = Standing<'_>> {
        let first = self.default_id().0 + RuleId::FIRST_TYPED.0;
        (first..).zip(&self.rules).map(|(id, rule)| Standing {
            id: RuleId(id),
            rule,
        })
    }

    /// A rule as a sentence calls it.
    pub fn describe(&self, rule: RuleId) -> String {
        self.named(as_decision(rule))
    }

    /// Every rule by address that would match a destination, in order: the first is not always the
    /// one that decides, for protected space is opened only by what means it.
    pub fn matching(&self, to: Destination) -> Vec<RuleId> {
        let matches = |rule: &Rule| match rule {
            Rule::Match(_, pattern) => pattern.matches(to),
            Rule::DenyFile(file) => file.line_for(to).is_some(),
            Rule::Name(..) => false,
        };
        let standing = self.standing().filter(|standing| matches(standing.rule));
        standing.map(|standing| standing.id).collect()
    }

    /// The rules about a name (in lower case, wire form), in order; all of its ports.
    pub fn speaking_of(&self, name: Name<'_>) -> Vec<RuleId> {
        let first = self.default_id().0 + RuleId::FIRST_TYPED.0;
        let mut about: Vec<u32> = self.about(name).iter().map(|place| place.order).collect();
        about.dedup();
        about
            .into_iter()
            .map(|place| RuleId(first + place))
            .collect()
    }

    /// Whether a name may be asked for.
    pub fn question(&self, name: Name<'_>) -> Decision {
        let about = self.about(name);
        match self.judges_names() {
            true if self.hides(name, &about) => Decision {
                rule: self.elsewhere_id(),
                line: None,
                refusal: Some(Refusal::DnsElsewhere),
            },
            true => self.resolves(&about),
            false => as_decision(self.default_id()),
        }
    }

    /// Judges a destination as if DNS had just told it for `name`: what [`super::Judge::decide`] says
    /// after the guest has asked.
    pub fn decide_as(&self, to: Destination, name: Name<'_>) -> Decision {
        let by_address = self.decide(to);
        let by_rule = ![self.default_id(), self.elsewhere_id()].contains(&by_address.rule);
        if self.without_dns().is_some() {
            return by_address;
        }
        if by_rule && !by_address.is_allowed() || !self.question(name).is_allowed() {
            return by_address;
        }
        match self.first_of(&self.about(name), to) {
            Some(by_name) if !by_rule || by_name.rule < by_address.rule => by_name,
            _ => by_address,
        }
    }

    /// What becomes of a guest that asks for a name and connects to what it is told, in sentences,
    /// one a line; and whether it comes through. `port`: `None`: to whatever port.
    pub fn explain_name(&self, name: Name<'_>, port: Option<(u16, Protocol)>) -> (bool, String) {
        if let Some((DNS_PORT, Protocol::Tcp | Protocol::Udp)) = port {
            return self.explain_port_53();
        }
        let shown = name.without_dot();
        if let Some(text) = self.without_dns() {
            let sentence = format!("{shown} is not resolved, by {text}: no name is.");
            return (false, sentence);
        }
        let question = self.question(name);
        let mut sentences = Vec::new();
        let by = |decision: Decision| match self.place_of(decision.rule) {
            Some(_) => format!("by {}", self.named(decision)),
            None if decision.rule == self.elsewhere_id() => {
                "for it is of a resolver elsewhere (safe defaults)".to_owned()
            }
            None => format!("for the default is {}", self.default_action().name()),
        };
        if !question.is_allowed() {
            sentences.push(format!(
                "{shown} is not resolved, {}: the guest is answered REFUSED.",
                by(question)
            ));
            return (false, sentences.join("\n"));
        }
        sentences.push(format!("{shown} is resolved, {}.", by(question)));
        let about = self.about(name);
        let Some((port, protocol)) = port else {
            let opens = self.speaking_of(name).iter().any(|id| {
                let rule = self.standing().find(|standing| standing.id == *id);
                rule.is_some_and(|s| matches!(s.rule, Rule::Name(action, _) if action.admits()))
            });
            sentences.push(match opens {
                true => "Its addresses are opened for the ports of the rules about it, below."
                    .to_owned(),
                false => format!(
                    "No rule by name opens its addresses: they are judged by address, and the \
                     default is {}.",
                    self.default_action().name()
                ),
            });
            let passes = opens || self.default_action() != Action::Deny;
            return (passes, sentences.join("\n"));
        };
        // An address of nobody's special space.
        let to = Destination {
            addr: [192, 0, 2, 1].into(),
            port,
            protocol,
        };
        let what = match protocol {
            Protocol::Icmp => "Ping".to_owned(),
            protocol => format!("{} port {port}", protocol.name().to_uppercase()),
        };
        let by_name = self.first_of(&about, to);
        let instead = match by_name {
            Some(by_name) => self.instead_of(by_name, (port, protocol)),
            None => Vec::new(),
        };
        // Of these the first decides, or the first that denies.
        let everywhere = || {
            let all = || {
                instead
                    .iter()
                    .filter(|(_, _, p)| p.prefix().prefix_len() == 0)
            };
            let denies = all().find(|(_, action, _)| *action == Action::Deny);
            denies.or_else(|| all().next())
        };
        let allowed = match by_name {
            Some(_) if let Some((id, action, _)) = everywhere() => {
                sentences.push(format!(
                    "{what} of it is {} whatever address it has, by {}, which {}.",
                    became(*action),
                    self.describe(*id),
                    match action {
                        Action::Deny => "beats every name",
                        Action::Allow | Action::Inspect => "comes before the rule about the name",
                    }
                ));
                return (*action != Action::Deny, sentences.join("\n"));
            }
            Some(decision) if decision.is_allowed() => {
                sentences.push(format!(
                    "{what} of what DNS tells for it is opened {}.",
                    by(decision)
                ));
                if self.inspects(decision.rule) {
                    sentences.push(
                        "Inspected: the connection must say a name that the rules let in there."
                            .to_owned(),
                    );
                }
                true
            }
            Some(decision) => {
                sentences.push(format!("{what} of it is refused {}.", by(decision)));
                false
            }
            None => {
                let default = self.default_action();
                sentences.push(format!(
                    "No rule by name speaks of {what}: the address is judged by itself, and the \
                     default is {}.",
                    default.name()
                ));
                default != Action::Deny
            }
        };
        // Of denies it is said below.
        let admits = |(_, action, _): &&(RuleId, Action, &Pattern)| action.admits();
        let within = instead.iter().filter(admits);
        for (id, action, pattern) in within.clone().take(SHOWN_RULES) {
            sentences.push(format!(
                "Where its address is in {}, it is {} by {}.",
                pattern.prefix(),
                became(*action),
                self.describe(*id)
            ));
        }
        if let Some(more @ 1..) = within.count().checked_sub(SHOWN_RULES) {
            sentences.push(format!("So do {more} more rules by address."));
        }
        if allowed
            && self
                .rules
                .iter()
                .any(|rule| !matches!(rule, Rule::Name(..)))
        {
            sentences.push(
                "What a rule by address denies, and protected space, stays shut all the same."
                    .to_owned(),
            );
        }
        (allowed, sentences.join("\n"))
    }

    /// The rules by address that take a port of a name's addresses from the rule about the name, and
    /// do otherwise: denies, and what stands before it.
    fn instead_of(
        &self,
        by_name: Decision,
        (port, protocol): (u16, Protocol),
    ) -> Vec<(RuleId, Action, &Pattern)> {
        let does = match (by_name.is_allowed(), self.inspects(by_name.rule)) {
            (false, _) => return Vec::new(),
            (true, true) => Action::Inspect,
            (true, false) => Action::Allow,
        };
        let standing = self.standing();
        standing
            .filter_map(|s| match s.rule {
                Rule::Match(action, pattern) => Some((s.id, *action, pattern)),
                Rule::Name(..) | Rule::DenyFile(_) => None,
            })
            .filter(|(id, action, pattern)| {
                *action != does
                    && (*action == Action::Deny || *id < by_name.rule)
                    && pattern.scope().matches(port, protocol)
            })
            .collect()
    }

    /// The first rule by address that admits, without inspection, some of what an inspect rule
    /// about a name would have inspected.
    pub fn uninspected_by(&self, later: Standing<'_>) -> Option<RuleId> {
        let Rule::Name(Action::Inspect, name) = later.rule else {
            return None;
        };
        let mut earlier = self.standing().take_while(|s| s.id < later.id);
        earlier.find_map(|s| match s.rule {
            Rule::Match(Action::Allow, pattern) => {
                pattern.scope().overlaps(name.scope()).then_some(s.id)
            }
            _ => None,
        })
    }

    /// Whether nothing is left for a rule to decide, since an earlier one matches all that it
    /// matches: the first such one.
    pub fn covered_by(&self, later: Standing<'_>) -> Option<RuleId> {
        let mut earlier = self.standing().take_while(|s| s.id < later.id);
        earlier.find_map(|s| covers(s.rule, later.rule).then_some(s.id))
    }
}

fn covers(earlier: &Rule, later: &Rule) -> bool {
    match (earlier, later) {
        (Rule::Match(action, a), Rule::Match(later, b)) => {
            a.contains(b) && (*action == Action::Deny || !speaks_where_not(a, *later, b))
        }
        (Rule::DenyFile(file), Rule::Match(_, b)) => file.patterns().any(|a| a.contains(b)),
        (Rule::Name(_, a), Rule::Name(_, b)) => a.contains(b),
        (Rule::DenyFile(file), Rule::Name(_, b)) => {
            let mut lines = file.lines_about(b.name()).into_iter();
            lines.any(|line| file.name_at(line).is_some_and(|a| a.contains(b)))
        }
        _ => false,
    }
}

/// Whether there is protected space that an admitting rule for `a` is too broad to open, and in
/// which a later rule for `b`, within `a`, has a say.
fn speaks_where_not(a: &Pattern, later: Action, b: &Pattern) -> bool {
    let (a, b) = (a.prefix(), b.prefix());
    everywhere().any(|range| {
        let overlaps = range.contains(&b) || b.contains(&range);
        let opens = range.prefix_len() <= b.prefix_len();
        overlaps && range.prefix_len() > a.prefix_len() && (later == Action::Deny || opens)
    })
}

fn became(action: Action) -> &'static str {
    match action {
        Action::Allow => "admitted and not inspected",
        Action::Inspect => "admitted and inspected",
        Action::Deny => "refused",
    }
}

fn as_decision(rule: RuleId) -> Decision {
    Decision {
        rule,
        line: None,
        refusal: None,
    }
}

impl Pattern {
    /// Whether everything that `other` matches is matched.
    pub fn contains(&self, other: &Self) -> bool {
        self.prefix().contains(&other.prefix()) && self.scope().contains(other.scope())
    }
}

impl NamePattern {
    /// Whether everything that `other` matches is matched.
    pub fn contains(&self, other: &Self) -> bool {
        let (a, b) = (self.name().0, other.name().0);
        let names = match (self.is_exact(), other.is_exact()) {
            (true, true) => a == b,
            (true, false) => false,
            // Label by label: a tail of bytes may begin within a label.
            (false, true) => parents(b).any(|parent| parent == a),
            (false, false) => a == b || parents(b).any(|parent| parent == a),
        };
        names && self.scope().contains(other.scope())
    }

    /// Whether both are about the same names.
    pub fn is_about_same(&self, other: &Self) -> bool {
        (self.name().0, self.is_exact()) == (other.name().0, other.is_exact())
    }
}

/// The names above a name in wire form.
fn parents(name: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::successors(parent(name), |name| parent(name))
}

fn parent(name: &[u8]) -> Option<&[u8]> {
    let length = usize::from(*name.first()?);
    name.get(1 + length..).filter(|rest| !rest.is_empty())
}

/// What a destination is called in a sentence.
pub fn describe(to: Destination) -> String {
    target(to)
}

#[cfg(test)]
#[path = "offline_test.rs"]
mod tests;
