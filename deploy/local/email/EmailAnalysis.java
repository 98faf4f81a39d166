package io.penstock.analysis;

import java.io.IOException;
import java.util.HashSet;
import java.util.Set;
import java.util.regex.Pattern;
import org.apache.lucene.analysis.FilteringTokenFilter;
import org.apache.lucene.analysis.TokenStream;
import org.apache.lucene.analysis.Tokenizer;
import org.apache.lucene.analysis.email.UAX29URLEmailTokenizer;
import org.apache.lucene.analysis.pattern.PatternCaptureGroupTokenFilter;
import org.apache.lucene.analysis.tokenattributes.CharTermAttribute;
import org.elasticsearch.plugin.NamedComponent;
import org.elasticsearch.plugin.analysis.TokenFilterFactory;
import org.elasticsearch.plugin.analysis.TokenizerFactory;

/** What the index of Elasticsearch's own users analyses addresses with; a full Elasticsearch has it as a module. */
public final class EmailAnalysis {
    private EmailAnalysis() {}

    @NamedComponent("uax_url_email")
    public static final class Addresses implements TokenizerFactory {
        @Override
        public Tokenizer create() {
            return new UAX29URLEmailTokenizer();
        }
    }

    /** With the patterns that this index gives it, and no others. */
    @NamedComponent("pattern_capture")
    public static final class Parts implements TokenFilterFactory {
        private static final Pattern[] PATTERNS = {
            Pattern.compile("([^@]+)"), Pattern.compile("(\\p{L}+)"), Pattern.compile("(\\d+)"), Pattern.compile("@(.+)")
        };

        @Override
        public TokenStream create(TokenStream input) {
            return new PatternCaptureGroupTokenFilter(input, true, PATTERNS);
        }
    }

    @NamedComponent("unique")
    public static final class Unique implements TokenFilterFactory {
        @Override
        public TokenStream create(TokenStream input) {
            return new Seen(input);
        }
    }

    private static final class Seen extends FilteringTokenFilter {
        private final CharTermAttribute term = addAttribute(CharTermAttribute.class);
        private final Set<String> seen = new HashSet<>();

        Seen(TokenStream input) {
            super(input);
        }

        @Override
        protected boolean accept() {
            return seen.add(term.toString());
        }

        @Override
        public void reset() throws IOException {
            super.reset();
            seen.clear();
        }
    }
}
