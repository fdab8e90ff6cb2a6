//! What an inspected connection says, judged.
use std::rc::Rc;

use thiserror::Error;

use super::{Destination, Judge, LearntName};
use crate::dns::Name;

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
        let policy = self.policy(vm);
        let name = said.without_dot();
        // What is said is judged like what is asked for, and a rule about its port is heard too.
        let about = policy.about(said);
        let asked = self.asks(vm, said, &about);
        let decisions = [Some(asked), policy.first_of(&about, to)];
        if let Some(refused) = decisions.into_iter().flatten().find(|d| !d.is_allowed()) {
            let rule = match refused.rule == policy.default_id() {
                true => "the default, for no rule allows it".into(),
                false => policy.named(refused),
            };
            return Err(Said::Refused { name, rule });
        }
        let told = self
            .learnt
            .names(vm, to.addr, now_ns)
            .find(|learnt| *learnt.name == *name);
        let Some(told) = told else {
            let address = to.addr;
            return Err(Said::NotTold { name, address });
        };
        // A rule by name that is not about this port does not let the name in here; one by address
        // lets in every name that may be asked for.
        let by_name = policy.first_of(&told.rules, to);
        let by_address = policy.decide(to);
        let refused = match by_name {
            Some(decision) => decision,
            None => by_address,
        };
        match refused.is_allowed() {
            true => Ok(told.clone()),
            false => Err(Said::Refused {
                name,
                rule: policy.named(refused),
            }),
        }
    }
}

#[cfg(test)]
#[path = "inspect_test.rs"]
mod tests;
