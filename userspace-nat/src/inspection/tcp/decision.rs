//! Decision about the received bytes, and the time limits for it.
use std::rc::Rc;

use slipgate_abi::tcp::Flags;

use crate::{
    inspection::{
        reassembly::{MAX_LEN, Reassembly},
        spoken::Step,
        tcp::{HostName, Outcome, Phase, Received, Refused, SLOW_NS, Session, Wire},
        tls,
    },
    name_gate::LearntName,
};

/// Event that the session awaits from the guest, and until when.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Patience {
    Endless,
    /// The guest must begin to send until then, ns.
    ToSpeak(u64),
    /// The guest must complete what it has begun to send until then, ns.
    ToFinish(u64),
    /// The guest must close until then, ns: its server gave up before all names were given.
    ToClose(u64),
}

impl Patience {
    pub(super) fn ends_ns(self) -> Option<u64> {
        match self {
            Self::Endless => None,
            Self::ToSpeak(at) | Self::ToFinish(at) | Self::ToClose(at) => Some(at),
        }
    }
}

impl Session {
    /// Decides about the received bytes, and sends those that are allowed.
    pub(super) fn proceed(
        &mut self,
        wire: &mut dyn Wire,
        may: &mut dyn FnMut(&HostName, &mut Vec<Rc<LearntName>>) -> bool,
        now_ns: u64,
    ) -> Outcome {
        if let Some(why) = self.goes_on_after_early_answer() {
            return self.refuse(why, wire);
        }
        let before = self.allowed;
        let mut held = false;
        while self.phase == Phase::Open {
            let step = match self.spoken.next(&self.stream.whole()[self.allowed..]) {
                Ok(step) => step,
                Err(why) => return self.refuse(why, wire),
            };
            match step {
                Step::Said(name, len) => {
                    if !may(&name, &mut self.named) {
                        return self.refuse(Refused::Name, wire);
                    }
                    self.is_let_in = true;
                    self.allowed += len;
                    if self.spoken.wants_answer() {
                        self.answer = Some(Reassembly::new(self.guest_ack));
                    }
                }
                Step::Pass(len) => {
                    self.allowed += len;
                    if self.spoken.is_in_content() {
                        self.content_allowed();
                    }
                }
                Step::More => break,
                Step::Held => {
                    held = true;
                    break;
                }
                Step::Rest => {
                    self.stream.forget_islands();
                    self.allowed = self.stream.whole().len();
                    self.phase = Phase::Passing;
                }
            }
        }
        let undecided = self.stream.whole().len() - self.allowed;
        if undecided > 0 && !held {
            if self.stream.is_ended() {
                return self.refuse(Refused::Malformed, wire);
            }
            if undecided >= MAX_LEN {
                return self.refuse(Refused::TooLong, wire);
            }
        }
        if undecided == 0 && self.stream.is_ended() {
            if !self.is_let_in {
                // Else the kernel would take over what nobody named.
                return self.refuse(Refused::NoName, wire);
            }
            self.phase = Phase::Passing;
        }
        self.be_patient(undecided > 0 && !held, self.allowed > before, now_ns);
        self.transmit(wire, now_ns);
        self.await_early_answer();
        self.outcome()
    }

    /// Examines the server's data while its answer matters. Returns whether the answer is known
    /// now.
    ///
    /// # Errors
    /// If the answer is not acceptable.
    pub(super) fn listen(&mut self, segment: &Received<'_>, now_ns: u64) -> Result<bool, Refused> {
        let Some(answer) = &mut self.answer else {
            return Ok(false);
        };
        let most = (tls::MAX_ANSWER * 2) as i32;
        let at = segment.sequence.wrapping_sub(answer.begin()) as i32;
        let payload = segment.payload;
        // What is too far away is out of reach, before and behind.
        let reach = most.checked_sub(at).map(usize::try_from);
        let Some(Ok(reach)) = reach else {
            return Ok(false);
        };
        answer.insert(
            segment.sequence,
            &payload[..payload.len().min(reach)],
            false,
        );
        let gives_up = segment.has(Flags::FIN) || tls::ends_by_alert(answer.whole());
        let told = self.spoken.server_said(answer.whole())?;
        if told {
            self.answer = None;
        } else if gives_up && !matches!(self.patience, Patience::ToClose(_)) {
            self.patience = Patience::ToClose(now_ns + SLOW_NS);
        }
        Ok(told)
    }

    pub(super) fn be_patient(&mut self, undecided: bool, progress: bool, now_ns: u64) {
        self.has_spoken |= progress;
        let begun = undecided || self.stream.has_islands();
        self.patience = match self.patience {
            _ if self.phase != Phase::Open => Patience::Endless,
            Patience::ToClose(at) => Patience::ToClose(at),
            Patience::ToFinish(at) if begun && !progress => Patience::ToFinish(at),
            _ if begun => Patience::ToFinish(now_ns + SLOW_NS),
            // Who has spoken may be silent for as long as it likes.
            _ if self.has_spoken => Patience::Endless,
            before => before,
        };
    }

    pub(super) fn outcome(&self) -> Outcome {
        if self.phase == Phase::Passing && self.sendable() == 0 {
            Outcome::Released
        } else {
            Outcome::Goes
        }
    }
}
