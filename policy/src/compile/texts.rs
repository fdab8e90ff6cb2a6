//! Numbers and texts of rules.
use std::ops::Range;

use super::{
    identity::{Described, meaning_of_default},
    policy::Policy,
};
use crate::{Action, Decision, Http, Note, Resolvers, Rule, RuleId};

impl Policy {
    /// Numbers the policy's rules from `first` on; returns the first number after them.
    pub(super) fn number_from(&mut self, first: u32) -> u32 {
        self.first = first;
        first + RuleId::FIRST_TYPED.0 + self.rules.len() as u32
    }

    /// Returns the policy with its rules numbered from `first` on.
    pub fn numbered(mut self, first: u32) -> Self {
        self.number_from(first);
        self
    }

    /// Returns the numbers of the policy's rules.
    pub fn numbers(&self) -> Range<u32> {
        self.first..self.first + RuleId::FIRST_TYPED.0 + self.rules.len() as u32
    }

    /// Whether a rule's number belongs to this policy.
    pub fn has(&self, rule: RuleId) -> bool {
        self.numbers().contains(&rule.0)
    }

    /// Returns a rule's position among the rules given, from 0; `None` for the default, the safe
    /// defaults and rules of other policies.
    pub fn place_of(&self, rule: RuleId) -> Option<u32> {
        let typed = self.first + RuleId::FIRST_TYPED.0;
        let place = rule.0.checked_sub(typed)?;
        (place < self.rules.len() as u32).then_some(place)
    }

    /// Returns the number of the default.
    pub fn default_id(&self) -> RuleId {
        RuleId(self.first + RuleId::DEFAULT.0)
    }

    /// Returns the number of the safe defaults.
    pub fn protected_id(&self) -> RuleId {
        RuleId(self.first + RuleId::PROTECTED.0)
    }

    /// Returns the number of the safe default against resolvers that bypass the rules by name.
    pub fn dns_bypass_id(&self) -> RuleId {
        RuleId(self.first + RuleId::DNS_ELSEWHERE.0)
    }

    pub(crate) fn id(&self, place: u32) -> RuleId {
        RuleId(self.first + RuleId::FIRST_TYPED.0 + place)
    }

    /// Returns the name of a rule in a sentence: `rule 3`, with the policy's name if it has one.
    pub fn call(&self, rule: RuleId) -> String {
        let number = self.place_of(rule).map_or(0, |place| place + 1);
        match &self.settings.name {
            Some(name) => format!("rule {number} of policy {name}"),
            None => format!("rule {number}"),
        }
    }

    /// Returns a rule's metadata; `None` for the default and the safe defaults.
    pub fn note(&self, rule: RuleId) -> Option<&Note> {
        self.notes.get(self.place_of(rule)? as usize)
    }

    /// Whether the rule inspects connections.
    pub fn inspects(&self, rule: RuleId) -> bool {
        self.place_of(rule)
            .is_some_and(|place| self.action(place) == Action::Inspect)
    }

    /// Returns how far an inspect rule follows an HTTP/1 connection.
    pub fn http(&self, rule: RuleId) -> Http {
        self.note(rule).map_or(Http::Each, |note| note.http)
    }

    /// Returns every rule's text, in the order of [`RuleId`].
    pub fn texts(&self) -> impl Iterator<Item = String> {
        (0..RuleId::FIRST_TYPED.0 + self.rules.len() as u32)
            .map(|offset| self.rule_text(RuleId(self.first + offset)))
    }

    /// Returns every rule's text and identity, in the order of [`RuleId`].
    pub fn described(&self) -> impl Iterator<Item = Described> {
        let shut = |what| meaning_of_default(what, Action::Deny);
        let defaults = [
            meaning_of_default("", self.default),
            shut("protected"),
            shut("elsewhere"),
        ];
        let meanings = defaults.into_iter().chain(self.meanings.iter().copied());
        let is_learning = self.settings.is_learning;
        let described = move |(meaning, text)| Described::new(meaning, is_learning, text);
        meanings.zip(self.texts()).map(described)
    }

    /// Returns the text of the rule that decided, with the line if it is a deny file.
    pub fn text(&self, decision: Decision) -> String {
        let text = self.rule_text(decision.rule);
        match decision.line {
            Some(line) => format!("{text}, line {line}"),
            None => text,
        }
    }

    fn rule_text(&self, rule: RuleId) -> String {
        let of = self.of_name();
        if let Some(place) = self.place_of(rule) {
            let dashes = self.dashes(self.notes[place as usize].place.is_none());
            return format!("{of}{dashes}{}", rule_text(&self.rules[place as usize]));
        }
        match rule {
            _ if rule == self.default_id() => {
                let dashes = self.dashes(self.settings.file.is_none());
                format!("{of}{dashes}default {}", self.default.name())
            }
            _ if rule == self.protected_id() => format!("{of}safe defaults"),
            _ if rule == self.dns_bypass_id() => format!("{of}safe defaults: DNS elsewhere"),
            _ => String::new(),
        }
    }

    /// Returns the setting by which no DNS question is answered, as rules are shown; `None` if
    /// questions are answered.
    pub fn without_dns(&self) -> Option<String> {
        let of = self.of_name();
        let nobody = self.settings.dns.resolvers == Resolvers::Nobody;
        nobody.then(|| match self.settings.file {
            None => format!("{of}--dns none"),
            Some(_) => format!("{of}resolvers none"),
        })
    }

    /// Returns the prefix of a rule's text: the name of the policy, if it has one.
    fn of_name(&self) -> String {
        let name = self.settings.name.as_ref();
        name.map_or_else(String::new, |name| format!("[{name}] "))
    }

    /// Returns the dashes of a flag for text that was given as a flag.
    fn dashes(&self, typed: bool) -> &'static str {
        if typed { "--" } else { "" }
    }
}

fn rule_text(rule: &Rule) -> String {
    match rule {
        Rule::Match(action, pattern) => format!("{} {pattern}", action.name()),
        Rule::Name(action, pattern) => format!("{} {pattern}", action.name()),
        Rule::DenyFile(file) => format!("deny-file {}", file.name()),
    }
}
