package worker;

/** Ends the process, with this exit code. */
final class ExitException extends Exception {
    static final int CONFIGURATION = 2;
    static final int STALE = 10;
    static final int ERROR = 11;

    final int code;

    ExitException(int code, String message) {
        super(message);
        this.code = code;
    }

    static ExitException error(String format, Object... arguments) {
        return new ExitException(ERROR, format.formatted(arguments));
    }
}
