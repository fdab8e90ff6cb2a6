//! Judgement of the server names in inspected connections.
use std::rc::Rc;

use slipgate_abi::VmId;

use thiserror::Error;

use slipgate_policy::{Destination, Name};

use super::{Judge, LearntName};

/// Reason why a connection may not be for the server that it names.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum NameRefusal {
    /// The rules refuse the name.
    #[error("{name} is refused by {rule}")]
    Refused {
        /// The name in the connection.
        name: String,
        /// The refusing rule, in words.
        rule: String,
    },
    /// DNS has not given this VM this address for that very name, or the opening has expired.
    #[error("DNS did not tell this VM that {address} is an address of {name}")]
    NotOpen {
        /// The name in the connection.
        name: String,
        /// Destination address of the connection.
        address: std::net::IpAddr,
    },
}

impl Judge {
    /// Judges whether an inspected connection of a VM to an address may be for the server that it
    /// names: the rules admit the name there, and DNS gave the VM the address for that very name.
    /// Names that share an address do not share this. Returns the name's opening.
    ///
    /// # Errors
    /// When the rules refuse the name, or DNS did not give the address for it.
    pub fn may_name(
        &self,
        vm: VmId,
        to: Destination,
        name: Name<'_>,
        now_ns: u64,
    ) -> Result<Rc<LearntName>, NameRefusal> {
        self.rules_allow(vm, to, name)?;
        let name = name.without_dot();
        let Some(opening) = self.learnt.by_name(vm, to.addr, &name, now_ns) else {
            let address = to.addr;
            return Err(NameRefusal::NotOpen { name, address });
        };
        // Rules that deny an alias on the way to the address are in the opening's rules.
        let policy = self.policy(vm);
        match policy.first_of(&opening.rules, to) {
            Some(refused) if !refused.is_allowed() => Err(NameRefusal::Refused {
                name,
                rule: policy.named(refused),
            }),
            _ => Ok(opening.clone()),
        }
    }

    /// Judges by the rules alone, as half of [`Judge::may_name`], whether a connection may name a
    /// server there.
    ///
    /// # Errors
    /// When the rules refuse the name.
    pub fn rules_allow(
        &self,
        vm: VmId,
        to: Destination,
        name: Name<'_>,
    ) -> Result<(), NameRefusal> {
        let policy = self.policy(vm);
        // The name is judged like one that is asked for. Then the first rule for its port applies:
        // one by name, or where none covers this port one by address, which admits every name that
        // may be asked for.
        let about = policy.about(name);
        let there = policy.first_of(&about, to);
        let decisions = [
            self.asks(vm, name, &about),
            there.unwrap_or_else(|| policy.decide(to)),
        ];
        let Some(refused) = decisions.into_iter().find(|d| !d.is_allowed()) else {
            return Ok(());
        };
        let rule = match refused.rule == policy.default_id() {
            true => "the default, for no rule allows it".into(),
            false => policy.named(refused),
        };
        let name = name.without_dot();
        Err(NameRefusal::Refused { name, rule })
    }
}

#[cfg(test)]
#[path = "inspect_test.rs"]
mod tests;
