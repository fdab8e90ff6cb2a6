//! Decision about the received bytes, and the time limits for it.
use std::rc::Rc;

use slipgate_abi::tcp::Flags;

use crate::{
    inspection::{
        protocol_sniffer::Step,
        reassembly::{MAX_LEN, Reassembly},
        tcp::{HostName, Outcome, Phase, Received, Refused, SILENT_NS, SLOW_NS, Session, Wire},
        tls,
    },
    name_gate::LearntName,
};

/// Time at which the session is refused, unless the guest acts before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Deadline {
    /// Time of the refusal, ns.
    pub(super) at_ns: u64,
    /// Reason of the refusal. `Silent`: the guest must begin to send. `Slow`: it must complete what
    /// it has begun to send. `Unanswered`: it must close, because its server gave up before all
    /// names were given.
    pub(super) why: Refused,
}

impl Deadline {
    pub(super) fn after(now_ns: u64, why: Refused) -> Self {
        let patience_ns = match why {
            Refused::Silent => SILENT_NS,
            _ => SLOW_NS,
        };
        Self {
            at_ns: now_ns + patience_ns,
            why,
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
            let step = match self.sniffer.next(&self.stream.whole()[self.allowed..]) {
                Ok(step) => step,
                Err(why) => return self.refuse(why, wire),
            };
            match step {
                Step::Named(name, len) => {
                    if !may(&name, &mut self.named) {
                        return self.refuse(Refused::Name, wire);
                    }
                    self.is_admitted = true;
                    self.allowed += len;
                    if self.sniffer.wants_answer() {
                        self.answer = Some(Reassembly::new(self.guest_ack));
                    }
                }
                Step::Pass(len) => {
                    self.allowed += len;
                    if self.sniffer.is_in_content() {
                        self.content_allowed();
                    }
                }
                Step::More => break,
                Step::Held => {
                    held = true;
                    break;
                }
                Step::Rest => {
                    self.stream.forget_out_of_order();
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
            if !self.is_admitted {
                // Else the kernel would take over what nobody named.
                return self.refuse(Refused::NoName, wire);
            }
            self.phase = Phase::Passing;
        }
        self.update_deadline(undecided > 0 && !held, self.allowed > before, now_ns);
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
        let is_known = self.sniffer.server_answered(answer.whole())?;
        if is_known {
            self.answer = None;
        } else if gives_up && !self.must_close() {
            self.deadline = Some(Deadline::after(now_ns, Refused::Unanswered));
        }
        Ok(is_known)
    }

    pub(super) fn update_deadline(&mut self, undecided: bool, progress: bool, now_ns: u64) {
        self.has_sent |= progress;
        let begun = undecided || self.stream.has_out_of_order();
        self.deadline = match self.deadline {
            _ if self.phase != Phase::Open => None,
            before if self.must_close() => before,
            Some(before) if before.why == Refused::Slow && begun && !progress => Some(before),
            _ if begun => Some(Deadline::after(now_ns, Refused::Slow)),
            // Who has spoken may be silent for as long as it likes.
            _ if self.has_sent => None,
            before => before,
        };
    }

    /// Whether the guest can only close now.
    fn must_close(&self) -> bool {
        self.deadline
            .is_some_and(|deadline| deadline.why == Refused::Unanswered)
    }

    pub(super) fn outcome(&self) -> Outcome {
        if self.phase == Phase::Passing && self.sendable() == 0 {
            Outcome::Released
        } else {
            Outcome::Goes
        }
    }
}
