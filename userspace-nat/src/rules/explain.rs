//! A decision in words, for `slipgate why`.
use std::fmt;

use slipgate_abi::Protocol;

use super::{Action, Decision, Destination, Policy, Rule, RuleId};

/// Which rule decides on a destination, and why no other did. [`Display`](fmt::Display) gives
/// sentences, one per line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Explanation {
    /// The decision.
    pub decision: Decision,
    sentences: Vec<String>,
}

impl Policy {
    /// Explains what [`Policy::decide`] says of `to`.
    pub fn explain(&self, to: Destination) -> Explanation {
        let decision = self.decide(to);
        let target = target(to);
        let outcome = if decision.is_allowed() {
            "allowed"
        } else {
            "refused"
        };
        let space = self.protected(to.addr);

        let mut sentences = Vec::new();
        match decision.rule {
            RuleId::DEFAULT => sentences.push(format!(
                "{target} is {outcome}: no rule matches, and the default is {}.",
                self.default_action().name()
            )),
            RuleId::PROTECTED => sentences.push(format!(
                "{target} is refused by the safe defaults: {} is {}.",
                to.addr,
                space.map_or("protected", |(_, space)| space.describe()),
            )),
            rule => {
                let number = rule.0 - RuleId::FIRST_TYPED.0 + 1;
                let text = self.text(decision);
                sentences.push(format!("{target} is {outcome} by rule {number}, `{text}`."));
                sentences.extend(self.matched_line(decision));
            }
        }
        if let Some((range, space)) = space {
            if let Some(text) = self.too_broad(to, decision) {
                sentences.push(format!(
                    "`{text}` matches too, but is broader than {range} and so does not open it."
                ));
            }
            let never = space.never_opens();
            if decision.rule == RuleId::PROTECTED {
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

    fn matched_line(&self, decision: Decision) -> Option<String> {
        let line = decision.line?;
        let index = (decision.rule.0 - RuleId::FIRST_TYPED.0) as usize;
        match self.rules.get(index)? {
            Rule::DenyFile(file) => Some(format!(
                "Line {line} of {} reads {}.",
                file.name(),
                file.pattern_at(line)?
            )),
            Rule::Match(..) | Rule::Name(..) => None,
        }
    }

    /// The first allow before the deciding rule that matches but may not open protected space.
    fn too_broad(&self, to: Destination, decision: Decision) -> Option<String> {
        let (range, _) = self.protected(to.addr)?;
        let before = match decision.rule {
            RuleId::PROTECTED => self.rules.len(),
            rule => (rule.0 - RuleId::FIRST_TYPED.0) as usize,
        };
        self.rules[..before].iter().find_map(|rule| match rule {
            Rule::Match(Action::Allow, pattern)
                if pattern.matches(to) && pattern.prefix().prefix_len() < range.prefix_len() =>
            {
                Some(format!("--allow {pattern}"))
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

pub(super) fn target(to: Destination) -> String {
    match to.protocol {
        Protocol::Icmp => format!("Ping to {}", to.addr),
        protocol => format!(
            "{} to {}:{}",
            protocol.name().to_uppercase(),
            to.addr,
            to.port
        ),
    }
}

/// The narrowest pattern for `to`.
fn narrow(to: Destination) -> String {
    match to.protocol {
        Protocol::Icmp => format!("{}/icmp", to.addr),
        protocol => format!("{}:{}/{}", to.addr, to.port, protocol.name()),
    }
}

#[cfg(test)]
#[path = "explain_test.rs"]
mod tests;
