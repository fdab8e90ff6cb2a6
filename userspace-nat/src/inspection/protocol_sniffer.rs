//! Application protocol of a client's TCP stream, followed from its first byte: where a server is
//! named, and which bytes may be sent to it.
use crate::inspection::{
    HostName, Refused,
    http::{self, Beginning, Body},
    tls,
};
use slipgate_policy::Http;

/// Decision about the next bytes of the stream.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// This many bytes name a server. They may be sent if the rules admit the name.
    Named(HostName, usize),
    /// This many bytes may be sent.
    Pass(usize),
    /// More bytes are needed for a decision.
    More,
    /// No byte may be sent before the server has answered; see [`ProtocolSniffer::server_answered`].
    Held,
    /// All further bytes may be sent.
    Rest,
}

/// Protocol of the stream and its state.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ProtocolSniffer {
    mode: Http,
    state: State,
    /// Whether the server asked for another hello.
    is_again: bool,
}

#[derive(Clone, PartialEq, Eq, Debug, Default)]
enum State {
    #[default]
    Begin,
    Hello,
    /// The server's answer to a hello is awaited.
    Answer,
    /// A second hello is awaited, after this many more bytes of a record that is none.
    Again(usize),
    Head,
    /// A request's content, and the state of its first line.
    Body(Body, Beginning),
    Rest,
}

impl ProtocolSniffer {
    /// State before the first byte.
    pub fn new(mode: Http) -> Self {
        Self {
            mode,
            ..Self::default()
        }
    }

    /// Examines the bytes after those that were sent. The next call continues after this step's
    /// bytes; [`Step::More`] and [`Step::Held`] have none.
    ///
    /// # Errors
    /// If the stream is refused.
    pub fn next(&mut self, bytes: &[u8]) -> Result<Step, Refused> {
        if bytes.is_empty() && self.state != State::Rest {
            return Ok(match self.state {
                State::Answer => Step::Held,
                _ => Step::More,
            });
        }
        match &mut self.state {
            State::Begin => {
                self.state = match bytes[0] {
                    tls::FIRST_OCTET => State::Hello,
                    octet if http::may_begin(octet) => State::Head,
                    _ => return Err(Refused::Unknown),
                };
                self.next(bytes)
            }
            State::Hello => self.hello(bytes),
            State::Answer => Ok(Step::Held),
            State::Again(0) => match tls::before_second_hello(bytes)? {
                Some((here, left)) => {
                    self.state = State::Again(left);
                    Ok(Step::Pass(here))
                }
                None => self.hello(bytes),
            },
            State::Again(left) => {
                let here = bytes.len().min(*left);
                *left -= here;
                Ok(Step::Pass(here))
            }
            State::Head => self.head(bytes),
            State::Body(body, beginning) => {
                let content = body.content(bytes).unwrap_or_default();
                let is_content = !content.is_empty();
                let bytes = match beginning.take(content) {
                    0 if is_content => return Err(Refused::Malformed),
                    here if is_content => &bytes[..here],
                    _ => bytes,
                };
                match body.take(bytes)? {
                    Some(0) => Ok(Step::More),
                    Some(here) => Ok(Step::Pass(here)),
                    None => {
                        self.state = State::Head;
                        self.head(bytes)
                    }
                }
            }
            State::Rest => Ok(Step::Rest),
        }
    }

    fn hello(&mut self, bytes: &[u8]) -> Result<Step, Refused> {
        let Some(hello) = tls::client_hello(bytes)? else {
            return Ok(Step::More);
        };
        self.state = State::Answer;
        Ok(Step::Named(hello.name, hello.len))
    }

    fn head(&mut self, bytes: &[u8]) -> Result<Step, Refused> {
        let Some(head) = http::parse(bytes)? else {
            return Ok(Step::More);
        };
        self.state = match self.mode {
            Http::First => State::Rest,
            Http::Each if head.upgrades => return Err(Refused::Unsupported),
            Http::Each if head.is_doubtful => return Err(Refused::Malformed),
            Http::Each => State::Body(head.body, Beginning::default()),
        };
        Ok(Step::Named(head.name, head.len))
    }

    /// Whether the stream is in a request's content, or directly after it.
    pub fn is_in_content(&self) -> bool {
        matches!(self.state, State::Body(..))
    }

    /// Whether more of a request's content follows.
    pub fn has_content_to_come(&self) -> bool {
        matches!(self.state, State::Body(body, _) if body != Body::Length(0))
    }

    /// Whether the next step depends on the server's answer.
    pub fn wants_answer(&self) -> bool {
        self.state == State::Answer
    }

    /// Examines the server's stream since the hello. Returns whether it suffices to continue.
    ///
    /// # Errors
    /// If the answer is not one of a TLS server.
    pub fn server_answered(&mut self, stream: &[u8]) -> Result<bool, Refused> {
        if self.state != State::Answer {
            return Ok(false);
        }
        self.state = match tls::server_answer(stream, self.is_again) {
            None => return Ok(false),
            Some(tls::Answer::Retry) => {
                self.is_again = true;
                State::Again(0)
            }
            Some(tls::Answer::Hello) => State::Rest,
            Some(tls::Answer::Other) => return Err(Refused::Unanswered),
        };
        Ok(true)
    }
}

#[cfg(test)]
#[path = "protocol_sniffer_test.rs"]
mod tests;

#[cfg(test)]
#[path = "smuggling_test.rs"]
mod smuggling;
