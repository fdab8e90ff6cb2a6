//! Another policy under way: `slipgate policy apply`, and SIGHUP.
//!
//! # Theory of operation
//! Everything is read and checked before anything is changed: what is wrong with a file leaves all
//! as it was. Then, in an order in which at any time one of the two policies holds whole:
//!
//! 1. the rules get elements of `RULES`, which flows of the old policy do not name;
//! 2. what the new policy denies is put into the guard's list under numbers of its own, and then the
//!    VMs' rows get these numbers. The engine still judges by the old one;
//! 3. the engine is told, which changes between two packets, cuts what the new one refuses, and
//!    answers when none of it can leave any more;
//! 4. rates are set, what the old policy had in the guard's list is removed, and who asked is
//!    answered.
//!
//! There is one change at a time.
use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use slipgate_control::vm;
use slipgate_policy::PolicySet;

use super::{
    Broker,
    attached::{Attached, described},
    opened::{Opened, OpenedVms},
    rule_texts,
};
use crate::{
    channel::{Policies, ToEngine},
    config::Config,
    control_socket::{Answer, ClientId},
};
use slipgate_policy::document::{ConfigError, LoadedPolicies};

/// A change that the engine is at.
#[derive(Debug)]
pub(super) struct Applying {
    request: u64,
    /// Who asked; nobody by a signal.
    client: Option<ClientId>,
    /// Where it was read from, for people.
    what: String,
    /// Numbers that the guard's list had before.
    before: BTreeSet<u32>,
    /// What the engine was told, for another in its place.
    told: Policies,
    /// No other policy was put in force: a VM was opened, or these are closed again, and their
    /// clients told by the end of the sockets.
    closed: Option<Vec<Opened>>,
}

/// A policy that is whole: read, checked, compiled.
pub(super) struct Read {
    config: Config,
    loaded: LoadedPolicies,
    /// The same, and those of VMs that learn.
    in_force: LoadedPolicies,
    policies: PolicySet,
}

impl Read {
    /// The command line's, with its files read again, or with another policy file.
    fn anew(config: &Config, file: Option<&Path>, opened: &OpenedVms) -> Result<Self, ConfigError> {
        let config = match file {
            Some(file) => config.with_policy_file(file)?,
            None => config.reread()?,
        };
        let loaded = config.load_policies()?;
        Self::of(config, loaded, opened)
    }

    /// What is in force, with other VMs that learn: nothing is read again.
    pub(super) fn again(attached: &Attached, opened: &OpenedVms) -> Result<Self, ConfigError> {
        let config = attached.config.settled()?;
        Self::of(config, attached.loaded.clone(), opened)
    }

    fn of(
        mut config: Config,
        loaded: LoadedPolicies,
        opened: &OpenedVms,
    ) -> Result<Self, ConfigError> {
        let in_force = opened.add_to(&mut config, &loaded);
        let policies = in_force.compile()?;
        Ok(Self {
            config,
            loaded,
            in_force,
            policies,
        })
    }

    /// Whether it can be put in force while running.
    fn check(&self, now: &Config) -> anyhow::Result<()> {
        if self.config.forwards != now.forwards {
            bail!(
                "it has other forwards, whose ports are taken at the start only: restart slipgate \
                 with --on-exit keep, which keeps the flows"
            );
        }
        Ok(())
    }
}

impl Broker {
    /// Puts what the files say now in force: the policy file that is in force, or `file`, and the
    /// deny files.
    pub(super) fn apply(
        &mut self,
        client: Option<ClientId>,
        file: Option<PathBuf>,
    ) -> anyhow::Result<()> {
        if self.applying.is_some() {
            match client {
                Some(client) => {
                    let error = "another policy is just being put in force: try again".to_owned();
                    self.control.answer(client, &Answer::Error { error });
                }
                None => self.apply_again = true,
            }
            return Ok(());
        }
        let opened = OpenedVms::of(&self.opened);
        let prepared = Read::anew(&self.attached.config, file.as_deref(), &opened)
            .map_err(anyhow::Error::from)
            .and_then(|read| {
                read.check(&self.attached.config)?;
                self.attached.take_in(read, Vec::new())
            });
        let (policies, before) = match prepared {
            Ok(prepared) => prepared,
            Err(e) => {
                let error = format!("{e:#}");
                match client {
                    Some(client) => self.control.answer(client, &Answer::Error { error }),
                    None => tracing::warn!("the policy stays as it was: {error}"),
                }
                return Ok(());
            }
        };
        let what = format!("{} is in force", self.attached.config.policy_name());
        self.tell_policies(policies, before, client, what, None)
    }

    /// Step 3. `what`: what is to be said when it is done.
    pub(super) fn tell_policies(
        &mut self,
        policies: Policies,
        before: BTreeSet<u32>,
        client: Option<ClientId>,
        what: String,
        closed: Option<Vec<Opened>>,
    ) -> anyhow::Result<()> {
        let request = self.asked.next();
        let told = Policies {
            request,
            ..policies
        };
        self.applying = Some(Applying {
            request,
            client,
            what,
            before,
            told: told.clone(),
            closed,
        });
        self.engine.tell(ToEngine::Policies(Box::new(told)))
    }

    /// Step 3 again, with an engine in the place of one that ended at it. That was started with the
    /// new policy, and has cut what that refuses; what is left to cut is what is said beside it.
    pub(super) fn tell_policies_again(&mut self) -> anyhow::Result<()> {
        let Some(applying) = &self.applying else {
            return Ok(());
        };
        // The host's addresses and the VMs are those of now, not of when it was first told.
        let told = Policies {
            local: self.attached.network_view().local,
            vms: self.attached.vm_specs(),
            ..applying.told.clone()
        };
        self.engine.tell(ToEngine::Policies(Box::new(told)))
    }

    /// The engine has: nothing that is denied now leaves any more.
    pub(super) fn applied(&mut self, request: u64, counts: Applied) -> anyhow::Result<()> {
        let Some(done) = self.applying.take_if(|a| a.request == request) else {
            return Ok(());
        };
        self.attached.set_rates();
        self.attached.keep_applied();
        self.attached.forget_denied(&done.before);
        let Applied { cut, kept, left } = counts;
        let more = match left {
            0 => String::new(),
            left => format!(", {left} of them against it"),
        };
        tracing::info!("{}: {cut} flows cut, {kept} go on{more}", done.what);
        if let Some(client) = done.client {
            let answer = match &done.closed {
                Some(_) => Answer::Done,
                None => Answer::Applied { cut, kept, left },
            };
            self.control.answer(client, &answer);
        }
        if std::mem::take(&mut self.apply_again) {
            return self.apply(None, None);
        }
        Ok(())
    }
}

/// What became of flows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Applied {
    pub(super) cut: u64,
    pub(super) kept: u64,
    pub(super) left: u64,
}

impl Attached {
    /// Steps 1 and 2: what the engine is to be told, and what the guard's list had before.
    /// `strictly`: VMs, by id, whose flows that may not be are cut in any case.
    pub(super) fn take_in(
        &mut self,
        read: Read,
        strictly: Vec<u32>,
    ) -> anyhow::Result<(Policies, BTreeSet<u32>)> {
        let Read {
            config,
            loaded,
            in_force: told,
            mut policies,
        } = read;
        let maps = self.datapath.maps();
        let rules = described(&policies, &config);
        let own = self.former_rules.clone();
        self.clear_other_turn()?;
        let in_force = described(&self.policies, &self.config).len() as u32;
        let in_force = self.rule_base..self.rule_base + in_force;
        let kept = [in_force, self.relayed_rules.clone()];
        let writer = rule_texts::Writer {
            paths: self.datapath.paths(),
            row: self.owner.row(),
            own: &own,
            kept: &kept,
        };
        let rule_base =
            rule_texts::write(maps, &rules, writer).context("giving the rules their numbers")?;
        // From here on nothing fails.
        let run = rule_base..rule_base + rules.len() as u32;
        if !self.former_rules.contains(&run) {
            self.former_rules.push(run);
        }
        let before = self.denied_numbers();
        self.turn = !self.turn;
        for vm in &mut self.vms {
            let new = config.vms.iter().find(|new| new.name == vm.config.name);
            if let Some(new) = new {
                vm.config = new.clone();
            }
        }
        policies.set_local(&self.network_view().local);
        self.config = config;
        self.loaded = loaded;
        self.in_force = told.clone();
        self.policies = policies;
        self.rule_base = rule_base;
        self.add_denied();
        for vm in &self.vms {
            let number = self.policy_number(vm.config.policy);
            vm::set_policy(self.datapath.maps(), vm.open.row, number);
        }
        let message = Policies {
            request: 0,
            policies: told,
            rule_base,
            local: self.network_view().local,
            vms: self.vm_specs(),
            strictly,
        };
        Ok((message, before))
    }
}
