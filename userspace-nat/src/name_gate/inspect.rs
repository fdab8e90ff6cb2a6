//! What an inspected connection says, judged.
use std::rc::Rc;

use thiserror::Error;

use slipgate_policy::{Destination, Name};

use super::{Judge, LearntName};

/// Why a connection may not be for the server that it names.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum Said {
    /// Rules refuse the name.
    #[error("{name} is refused by {rule}")]
    Refused {
        /// What was said.
        name: String,
        /// By which rule, in words.
        rule: String,
    },
    /// DNS did not tell this VM this address for that very name, or it is over.
    #[error("DNS did not tell this VM that {address} is an address of {name}")]
    NotTold {
        /// What was said.
        name: String,
        /// Where the connection goes.
        address: std::net::Ipv4Addr,
    },
}

impl Judge {
    /// Whether an inspected connection of a VM to an address may be for the server that it names:
    /// the rules let the name in there, and DNS told the VM the address for that very name. Names
    /// that share an address do not share this.
    pub fn said(
        &self,
        vm: u32,
        to: Destination,
        said: Name<'_>,
        now_ns: u64,
    ) -> Result<Rc<LearntName>, Said> {
        self.lets_in(vm, to, said)?;
        let name = said.without_dot();
        let Some(told) = self.learnt.told(vm, to.addr, &name, now_ns) else {
            let address = to.addr;
            return Err(Said::NotTold { name, address });
        };
        // What is denied of a name on the way to its address is in the opening's rules.
        let policy = self.policy(vm);
        match policy.first_of(&told.rules, to) {
            Some(refused) if !refused.is_allowed() => Err(Said::Refused {
                name,
                rule: policy.named(refused),
            }),
            _ => Ok(told.clone()),
        }
    }

    /// The rules' half of [`Judge::said`]: whether they let a name in there, whatever DNS told.
    pub fn lets_in(&self, vm: u32, to: Destination, said: Name<'_>) -> Result<(), Said> {
        let policy = self.policy(vm);
        // What is said is judged like what is asked for, and the first rule that speaks of its port
        // is heard too: one by name, or where none is about this port one by address, which lets in
        // every name that may be asked for.
        let about = policy.about(said);
        let there = policy.first_of(&about, to);
        let decisions = [
            self.asks(vm, said, &about),
            there.unwrap_or_else(|| policy.decide(to)),
        ];
        let Some(refused) = decisions.into_iter().find(|d| !d.is_allowed()) else {
            return Ok(());
        };
        let rule = match refused.rule == policy.default_id() {
            true => "the default, for no rule allows it".into(),
            false => policy.named(refused),
        };
        let name = said.without_dot();
        Err(Said::Refused { name, rule })
    }
}

#[cfg(test)]
#[path = "inspect_test.rs"]
mod tests;
