//! What a client speaks on a TCP connection, followed from its first byte: where a server is named,
//! and what may go on to it.
use crate::inspection::{
    HostName, Refused,
    http::{self, Beginning, Body},
    tls,
};
use slipgate_policy::Http;

/// What to do with the bytes that are there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// So many name a server, and may go on if it may be spoken to.
    Said(HostName, usize),
    /// So many may go on.
    Pass(usize),
    /// Nothing can be said before more is there.
    More,
    /// Nothing goes on before the server has answered: see [`Spoken::server_said`].
    Held,
    /// All may go on that is there and that comes.
    Rest,
}

/// A protocol and where it stands.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Spoken {
    mode: Http,
    state: State,
    /// The server wanted another hello.
    is_again: bool,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum State {
    Begin,
    Hello,
    /// The server's answer to a hello is to come.
    Answer,
    /// A second hello is to come; before it, so many more bytes of a record that is none.
    Again(usize),
    Head,
    /// A request's content, and how it begins.
    Body(Body, Beginning),
    Rest,
}

impl Spoken {
    /// Nothing was said.
    pub fn new(mode: Http) -> Self {
        Self {
            mode,
            state: State::Begin,
            is_again: false,
        }
    }

    /// Looks at the bytes behind those that went on. Each step is taken: the next call is about what
    /// is behind it. Nothing was taken when it is [`Step::More`] or [`Step::Held`].
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
        Ok(Step::Said(hello.name, hello.len))
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
        Ok(Step::Said(head.name, head.len))
    }

    /// Whether it is in a request's content, or behind that.
    pub fn is_in_content(&self) -> bool {
        matches!(self.state, State::Body(..))
    }

    /// Whether more of a request's content is to come.
    pub fn has_content_to_come(&self) -> bool {
        matches!(self.state, State::Body(body, _) if body != Body::Length(0))
    }

    /// Whether the server's answer decides how it goes on.
    pub fn wants_answer(&self) -> bool {
        self.state == State::Answer
    }

    /// The server's stream since the hello. Returns whether it was enough to go on.
    pub fn server_said(&mut self, stream: &[u8]) -> Result<bool, Refused> {
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
#[path = "spoken_test.rs"]
mod tests;

#[cfg(test)]
#[path = "smuggling_test.rs"]
mod smuggling;
