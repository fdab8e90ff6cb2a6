//! Explanation of a decision about a destination, for `slipgate why`.
use std::{fmt, net::SocketAddr};

use slipgate_abi::Protocol;

use crate::{Decision, Destination, Policy, Rule, compile::dns_bypass};

/// Explanation of which rule decides on a destination, and why no other does.
/// [`Display`](fmt::Display) gives sentences, one per line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Explanation {
    /// Decision that is explained.
    pub decision: Decision,
    sentences: Vec<String>,
}

impl Policy {
    /// Explains the decision of [`Policy::decide`] about `to`.
    pub fn explain(&self, to: Destination) -> Explanation {
        let mut sentences = Vec::new();
        let judged = self.judged_as(to);
        let decision = self.decide_alone(judged);
        if judged != to {
            let (outer, inner) = (to.addr, judged.addr);
            sentences.push(format!(
                "{outer} leads to the IPv4 address in it, {inner}, and is judged as that."
            ));
        }
        let to = judged;
        let target = to.describe();
        let outcome = if decision.is_allowed() {
            "allowed"
        } else {
            "refused"
        };
        let space = self.protected(to.addr);

        match decision.rule {
            rule if rule == self.default_id() => sentences.push(format!(
                "{target} is {outcome}: no rule matches, and the default is {}.",
                self.default_action().name()
            )),
            rule if rule == self.protected_id() => sentences.push(format!(
                "{target} is refused by the safe defaults: {} is {}.",
                to.addr,
                space.map_or("protected", |(_, space)| space.describe()),
            )),
            rule if rule == self.dns_bypass_id() => {
                let what = dns_bypass::dns_bypass(to).map_or("a resolver", |e| e.describe());
                sentences.push(format!(
                    "{target} is refused by the safe defaults: it is {what}, and would pass by the \
                     rules by name."
                ));
                let opens = dns_bypass::narrowest_pattern(to);
                sentences.push(format!("`--allow {opens}` would open it."));
            }
            rule => {
                sentences.push(format!(
                    "{target} is {outcome} by {}.",
                    self.named(decision)
                ));
                sentences.extend(self.matched_line(decision));
                if self.inspects(rule) {
                    let sentence = "Inspected: it must say a name that the rules let in there.";
                    sentences.push(sentence.to_owned());
                }
            }
        }
        if let Some((range, space)) = space {
            if let Some(text) = self.too_broad(to, decision) {
                sentences.push(format!(
                    "`{text}` matches too, but is broader than {range} and so does not open it."
                ));
            }
            let never = space.never_opens();
            if decision.rule == self.protected_id() {
                sentences.push(match never {
                    Some(why) => format!("No rule opens it: {why}."),
                    None => format!("`--allow {}` would open it.", narrow(to)),
                });
            } else if decision.is_allowed() {
                let (addr, what) = (to.addr, space.describe());
                sentences.push(match never {
                    Some(why) => format!("{addr} is {what}, and no rule opens it: {why}."),
                    None => format!("{addr} is {what}: the rule opens it on purpose."),
                });
            }
        }
        Explanation {
            decision,
            sentences,
        }
    }

    /// Returns a rule's name in a sentence: its number and text, the place where it is written, and
    /// its comment.
    pub fn named(&self, decision: Decision) -> String {
        let (call, text) = (self.call(decision.rule), self.text(decision));
        let mut named = format!("{call}, `{text}`");
        if let Some(note) = self.note(decision.rule) {
            match (&note.place, &note.comment) {
                (Some(place), Some(comment)) => named.push_str(&format!(" ({place}: {comment})")),
                (Some(place), None) => named.push_str(&format!(" ({place})")),
                (None, _) => {}
            }
        }
        named
    }

    /// Returns a sentence that quotes the matching line of a deny file, if one decided.
    fn matched_line(&self, decision: Decision) -> Option<String> {
        let line = decision.line?;
        let place = self.place_of(decision.rule)?;
        match self.rules.get(place as usize)? {
            Rule::DenyFile(file) => {
                let pattern = file.pattern_at(line).map(|p| p.to_string());
                let text = pattern.or_else(|| file.name_at(line).map(|n| n.to_string()))?;
                Some(format!("Line {line} of {} reads {text}.", file.name()))
            }
            Rule::Match(..) | Rule::Name(..) => None,
        }
    }

    /// Returns the text of the first allow before the deciding rule that matches but is too broad
    /// to open protected space.
    fn too_broad(&self, to: Destination, decision: Decision) -> Option<String> {
        let (range, _) = self.protected(to.addr)?;
        let before = self.place_of(decision.rule);
        let before = before.map_or(self.rules.len(), |place| place as usize);
        self.rules[..before].iter().find_map(|rule| match rule {
            Rule::Match(action, pattern)
                if action.admits()
                    && pattern.matches(to)
                    && pattern.prefix().prefix_len() < range.prefix_len() =>
            {
                Some(format!("--{} {pattern}", action.name()))
            }
            Rule::Match(..) | Rule::Name(..) | Rule::DenyFile(_) => None,
        })
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sentences.join("\n"))
    }
}

/// Returns the narrowest pattern that matches `to`.
fn narrow(to: Destination) -> String {
    match to.protocol {
        Protocol::Icmp | Protocol::Icmpv6 => format!("{}/icmp", to.addr),
        protocol => format!("{}/{}", SocketAddr::new(to.addr, to.port), protocol.name()),
    }
}

#[cfg(test)]
#[path = "destination_test.rs"]
mod tests;
